"""A sampler's step as one graph, which saves the overhead between the operations of small networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from knowable.core.chains.target import Recordable, Target
from knowable.core.compiling.recorder import Recorded
from knowable.core.network.batched import LINEAR_ALGEBRA_ERROR

Gradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Step = Callable[..., tuple[Tensor, ...]]
"""``(value_and_grad, *of every chain, *shared) -> new tensors of every chain``; it may not read values out of them."""


class FusedStep:
    """A step of all chains: one graph where the target compiles, the same operations one by one elsewhere."""

    def __init__(self, target: Target, step: Step, *, gradients: int = 1):
        self.target, self.step, self.gradients = target, step, gradients

    def __call__(self, chains: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The step of every chain."""
        recordable = self.target.recordable(len(chains[0]))
        if recordable is None:
            return self.step(self.target.value_and_grad, *chains, *shared)
        try:
            found = self._compiled(chains, shared, recordable)
        except LINEAR_ALGEBRA_ERROR:  # a matrix of some chain: the target lets the others go on
            return self.step(self.target.value_and_grad, *chains, *shared)
        self.target.count(len(chains[0]), self.gradients)
        return found

    def _compiled(
        self, chains: tuple[Tensor, ...], shared: tuple[Tensor, ...], recordable: Recordable
    ) -> tuple[Tensor, ...]:
        value_and_grad, constants = recordable
        graph = self.target.step_graphs.get(self.step)  # the target keeps graphs, so that a run compiles them once
        if graph is None:
            own = len(chains) + len(shared)

            def whole(*tensors: Tensor) -> tuple[Tensor, ...]:
                return self.step(lambda position: value_and_grad(position, *tensors[own:]), *tensors[:own])

            graph = self.target.step_graphs[self.step] = Recorded(whole, "compiled")
        size = self.target.block_size(len(chains[0]))
        if size == len(chains[0]):
            return graph(*chains, *shared, *constants)
        blocks = zip(*(each.split(size) for each in chains), strict=True)
        found = [graph(*block, *shared, *constants) for block in blocks]
        return tuple(torch.cat(each) for each in zip(*found, strict=True))
