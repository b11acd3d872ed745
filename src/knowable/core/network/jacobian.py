"""The Jacobian of a network's outputs in its parameters: row by row for a batch, and products with it.

For layers the Jacobian stays factored into gradients at the layer's outputs and activations, at every position; for
other parameters it is computed row by row. It is never held for all outputs: whoever needs many directions of the
outputs asks for some at a time.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from knowable.core.network.layers import Layer, NetworkLayers
from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Layout, Params, index_params, number_of_draws
from knowable.core.network.weight_uses import ForwardTrace, WeightTracer


class BatchJacobian:
    """The Jacobian of a batch of rows at given parameters, in evaluation mode.

    Args:
        network: The network.
        layers: What its parameters are.
        params: Values of its parameters.
        x: The rows.
        buffers: Its buffers.
        differentiable: Whether the Jacobian can itself be differentiated in ``params``.
    """

    def __init__(
        self, network: Network, layers: NetworkLayers, params: Params, x: Tensor, buffers: Buffers, *,
        differentiable: bool = False,
    ):  # fmt: skip
        self.network, self.layers, self.params, self.x, self.buffers = network, layers, params, x, buffers
        self.differentiable = differentiable
        with sdpa_kernel(SDPBackend.MATH) if differentiable else nullcontext():  # fused attention: one derivative only
            self.trace = ForwardTrace(
                network, layers.names, params, x, buffers, noted=layers.noted, differentiable=differentiable
            )
        layers.check(self.trace, len(x))

    @property
    def output(self) -> Tensor:
        """The network's output."""
        return self.trace.output if self.differentiable else self.trace.output.detach()

    @cached_property
    def activations(self) -> list[Tensor]:
        """For each layer what its matrix is multiplied with, ``(rows, positions, in)``."""
        with torch.set_grad_enabled(self.differentiable):
            return [self._activations(layer) for layer in self.layers]

    def _activations(self, layer: Layer) -> Tensor:
        uses = [self.trace.uses[use].activations() for use in layer.uses]
        found = [self.layers.axes[use].rows_first(a, len(self.x)) for use, a in zip(layer.uses, uses, strict=True)]
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        return whole if self.differentiable else whole.detach()

    def is_head(self, layer: Layer) -> bool:
        """Whether the layer's output, and nothing but it, is the network's output."""
        return len(layer.uses) == 1 and self.trace.is_output(self.trace.uses[layer.uses[0]])

    def at_rows(self, layer: Layer, values: Tensor) -> Tensor:
        """Values at the outputs of a layer's only use, ``(..., out)``, as ``(rows, positions, out)``."""
        return self.layers.axes[layer.uses[0]].rows_first(values, len(self.x))

    def gradients(self, directions: Tensor) -> list[Tensor]:
        """For each layer the gradients at its outputs of the outputs times each of K ``directions``.

        ``(K, rows, positions, out)``, for directions ``(K, *output)``.
        """
        at_uses = self.trace.gradients(directions)
        found = []
        for layer in self.layers:
            own = [self.layers.axes[use].rows_first(at_uses[use], len(self.x), lead=1) for use in layer.uses]
            found.append(own[0] if len(own) == 1 else torch.cat(own, dim=2))
        return found

    def others(self, directions: Tensor) -> Params:
        """For each other parameter the gradients of every row's outputs times ``directions``, ``(K, rows, *shape)``."""
        if not self.layers.others:
            return {}
        asked = {name: self.params[name] for name in self.layers.others}
        asked = asked if self.differentiable else {name: value.detach() for name, value in asked.items()}

        def of_one_row(values: Params, row: Tensor, direction: Tensor) -> Tensor:
            output = self.network({**self.params, **values}, row.unsqueeze(0), buffers=self.buffers)
            return (output[0] * direction).sum()

        with differentiable_operations(twice=self.differentiable):
            try:
                found = [vmap(grad(of_one_row), in_dims=(None, 0, 0))(asked, self.x, each) for each in directions]
            except (RuntimeError, NotImplementedError):  # an operation that cannot be batched
                found = [self._row_by_row(of_one_row, asked, direction) for direction in directions]
        return {name: torch.stack([each[name] for each in found]) for name in asked}

    def _row_by_row(self, of_one_row: Callable[..., Tensor], asked: Params, direction: Tensor) -> Params:
        rows = []
        with torch.enable_grad():
            leaves = {k: v if v.requires_grad else v.detach().requires_grad_() for k, v in asked.items()}
            for row, way in zip(self.x, direction, strict=True):
                value = of_one_row(leaves, row, way)
                rows.append(_gradient(value, leaves, create_graph=self.differentiable))
        return {name: torch.stack([each[name] for each in rows]) for name in asked}

    def flat(self, directions: Tensor, layout: Layout) -> Tensor:
        """Gradients of every row's outputs times ``directions`` in all parameters, ``(K, rows, D)``."""
        found = self.others(directions)
        for layer, a, g in zip(self.layers, self.activations, self.gradients(directions), strict=True):
            found |= layer.params(g.mT @ a)  # (K, rows, out, in): summed over positions
        return layout.flatten(found)


def unit_directions(output: Tensor) -> Tensor:
    """One direction for each output of a row, ``(outputs, *output)``."""
    count = output[0].numel()
    each = torch.eye(count, dtype=output.dtype, device=output.device).view(count, 1, *output.shape[1:])
    return each.expand(count, *output.shape)


# --- products with the Jacobian of a batch, which is not formed ------------------------------------------------------

Function = Callable[[Params], Tensor]
"""The outputs of some rows as a function of the weights."""


@contextmanager
def differentiable_operations(*, twice: bool = False) -> Iterator[None]:
    """Run networks by operations that have every kind of derivative and can be batched; ``twice``: second ones too."""
    with WeightTracer({}, take_apart=True, twice=twice), sdpa_kernel(SDPBackend.MATH):
        yield


def jacobian_vector_products(
    function: Function, at: Params, directions: Params, *, vectorise: bool, at_once: int | None = None
) -> Tensor:
    """J times each of a stack of directions: ``(K, rows, ...)``.

    Args:
        function: The outputs of the weights.
        at: The weights.
        directions: K directions, each with a leading dimension K.
        vectorise: In batched calls, where torch can.
        at_once: Directions of one batched call; None is all of them.
    """

    def one(direction: Params) -> Tensor:
        return jvp(function, (at,), (direction,))[1]

    _load_forward_derivatives()
    with differentiable_operations():
        try:
            if vectorise:
                return vmap(one, chunk_size=at_once)(directions)
            return torch.stack([one(index_params(directions, k)) for k in range(number_of_draws(directions))])
        except (RuntimeError, NotImplementedError):  # an operation without a forward derivative
            each = (index_params(directions, k) for k in range(number_of_draws(directions)))
            return torch.stack([_by_two_backward_passes(function, at, direction) for direction in each])


def vector_jacobian_product(function: Function, at: Params, vector: Tensor) -> Params:
    """Jᵀ times a vector of the shape of the outputs."""
    with torch.enable_grad(), differentiable_operations():
        leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
        output = function(leaves)
        return _gradient(output, leaves, vector)


def _gradient(output: Tensor, leaves: Params, vector: Tensor | None = None, *, create_graph: bool = False) -> Params:
    """Gradients of the output times a vector; zero where the output does not depend on a leaf."""
    if not output.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    found = torch.autograd.grad(
        output, list(leaves.values()), vector, create_graph=create_graph, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True))


@cache
def _load_forward_derivatives() -> None:
    """Import what forward derivatives need, once: PyTorch itself emits a DeprecationWarning there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def _by_two_backward_passes(function: Function, at: Params, direction: Params) -> Tensor:
    """J v as the derivative of u ↦ Jᵀ u in the direction v."""
    output, backward, *_ = vjp(function, at)
    _, twice, *_ = vjp(lambda u: backward(u)[0], torch.zeros_like(output))
    return twice(direction)[0]
