"""A sampler's step as one graph: its own arithmetic and the gradient of the target in between, fused.

For a small network the arithmetic of the gradient takes a tenth of a millisecond, and passing from one operation to the
next as long again. Where the target is compiled, a whole step is therefore one call of one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knowable.core.chains.target import Recordable, Target
from knowable.core.compiling.recorder import NOT_FACTORISED, compiled

Gradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Step = Callable[..., tuple[Tensor, ...]]
"""``(value_and_grad, *of every chain, *shared) -> new tensors of every chain``; it may not take numbers out of them."""


class FusedStep:
    """A step of all chains, one graph where the target compiles and the same operations one by one elsewhere.

    Args:
        target: The log density.
        step: What is done, as a function of the gradient to use, tensors ``(C, ...)`` and tensors all chains share.
        gradients: How many gradients a step takes.
    """

    def __init__(self, target: Target, step: Step, *, gradients: int = 1):
        self.target, self.step, self.gradients = target, step, gradients
        self._graphs: dict[Any, Any] = {}  # by the shapes that may change in one object's life

    def __call__(self, chains: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The step of every chain."""
        recordable = self.target.recordable(len(chains[0]))
        if recordable is None:
            return self.step(self.target.value_and_grad, *chains, *shared)
        try:
            found = self._fused(chains, shared, recordable)
        except NOT_FACTORISED:  # a matrix of some chain: the target sees to it that the others go on
            return self.step(self.target.value_and_grad, *chains, *shared)
        self.target.count(len(chains[0]), self.gradients)
        return found

    def _fused(
        self, chains: tuple[Tensor, ...], shared: tuple[Tensor, ...], recordable: Recordable
    ) -> tuple[Tensor, ...]:
        chains = tuple(each.contiguous() for each in chains)  # a graph takes what it was compiled for
        size = self.target.block_size(len(chains[0]))
        if size == len(chains[0]):
            return self._on(chains, shared, recordable)
        blocks = zip(*(each.split(size) for each in chains), strict=True)
        found = [self._on(block, shared, recordable) for block in blocks]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))

    def _on(self, block: tuple[Tensor, ...], shared: tuple[Tensor, ...], recordable: Recordable) -> Any:
        key = (len(block[0]), *(len(each) for each in recordable[1]))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._graph(block, shared, recordable)
        with torch.no_grad():
            return graph(*block, *shared, *recordable[1])

    def _graph(self, block: tuple[Tensor, ...], shared: tuple[Tensor, ...], recordable: Recordable) -> Any:
        """The target keeps graphs, so that they are compiled once in a run."""
        split, (value_and_grad, constants) = len(block) + len(shared), recordable
        key = (self.step, tuple((each.shape, each.dtype) for each in (*block, *shared, *constants)))
        graph = self.target.fused.get(key)
        if graph is None:

            def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
                def gradient(position: Tensor) -> tuple[Tensor, Tensor]:
                    return value_and_grad(position, *tensors[split:])

                return self.step(gradient, *tensors[:split])

            graph = self.target.fused[key] = compiled(whole, *block, *shared, *constants)
        return graph
