"""Gradients of each row's outputs in the network's parameters, in some directions of the outputs.

For layers they stay factored (gradients and activations at every position); for other parameters they are computed row
by row. A Jacobian for all outputs is never held: whoever needs many directions asks for some at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, vmap

from knowable.core.kronecker_block import unpack
from knowable.core.model import Model
from knowable.core.output_information import OutputInformation
from knowable.core.params import Layout
from knowable.core.types import Buffers, Params
from knowable.inference.laplace.anatomy import Anatomy
from knowable.inference.laplace.recording import Recording
from knowable.inference.laplace.tangents import differentiable
from knowable.inference.laplace.uses import Use


class Rows:
    """Some rows in the network at given parameters.

    Args:
        model: The model.
        anatomy: What the network's parameters are.
        params: Values of all parameters.
        x: The rows.
        buffers: The network's buffers.
    """

    def __init__(self, model: Model, anatomy: Anatomy, params: Params, x: Tensor, buffers: Buffers):
        self.model, self.anatomy, self.params, self.x, self.buffers = model, anatomy, params, x, buffers
        self.recording = Recording(model, anatomy.names, params, x, buffers, cut=False)

    @property
    def output(self) -> Tensor:
        """The network's output."""
        return self.recording.output.detach()

    @cached_property
    def activations(self) -> list[Tensor]:
        """For each layer what its matrix is multiplied with, ``(rows, positions, in)``."""
        return [self.anatomy.activations(self.recording, layer, len(self.x)) for layer in self.anatomy.layers]

    def head(self, number: int, information: OutputInformation) -> Use | None:
        """The use of a layer whose output is the network's, if that has independent positions in it.

        Then what targets say about the layer is known without following any direction back. None for other layers.
        """
        layer = self.anatomy.layers[number]
        use = self.recording.uses[layer.uses[0]]
        direct = self.anatomy.is_head(self.recording, layer) and information.couples_only(use.feature_dim)
        return use if direct else None

    def in_place(self, number: int, values: Tensor) -> Tensor:
        """Values at the outputs of a layer's only use, ``(..., out)``, as ``(rows, positions, out)``."""
        return self.anatomy.axes[self.anatomy.layers[number].uses[0]].rows_first(values, len(self.x))

    def gradients(self, directions: Tensor) -> list[Tensor]:
        """For each layer the gradients at its outputs of the outputs times each of K ``directions``.

        ``(K, rows, positions, out)``, for directions ``(K, *output)``.
        """
        found = self.recording.gradients(directions)
        return [self.anatomy.gradients(found, layer, len(self.x)) for layer in self.anatomy.layers]

    def others(self, directions: Tensor) -> Params:
        """For each other parameter the gradients of every row's outputs times ``directions``, ``(K, rows, *shape)``."""
        if not self.anatomy.others:
            return {}
        network = self.model.network_params(self.params)
        asked = {name: network[name].detach() for name in self.anatomy.others}

        def of_one_row(values: Params, row: Tensor, direction: Tensor) -> Tensor:
            output = self.model.network({**network, **values}, row.unsqueeze(0), buffers=self.buffers)
            return (output[0] * direction).sum()

        found = [self._row_by_row(grad(of_one_row), asked, direction) for direction in directions]
        return {name: torch.stack([each[name] for each in found]) for name in asked}

    def _row_by_row(self, gradient: Callable[..., Params], asked: Params, direction: Tensor) -> Params:
        with differentiable():
            try:
                return vmap(gradient, in_dims=(None, 0, 0))(asked, self.x, direction)
            except (RuntimeError, NotImplementedError):  # an operation that cannot be batched
                each = [gradient(asked, row, way) for row, way in zip(self.x, direction, strict=True)]
                return {name: torch.stack([found[name] for found in each]) for name in asked}

    def slope(self, y: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Σ log p(y | x, θ) of the rows and its gradient ``(D,)``, in double precision."""
        with torch.enable_grad():
            output = self.output.requires_grad_()
            value = self.model.score(output, y, self.params).double().sum()
            (direction,) = torch.autograd.grad(value, output)
        return value.detach(), layout.flatten(self.recording.in_parameters(direction)).double()

    def flat(self, directions: Tensor, layout: Layout) -> Tensor:
        """Gradients of every row's outputs times ``directions`` in all parameters, ``(K, rows, D)``."""
        found = self.others(directions)
        for layer, a, g in zip(self.anatomy.layers, self.activations, self.gradients(directions), strict=True):
            matrix = g.mT @ a  # (K, rows, out, in): summed over positions
            found |= unpack(matrix, layer.names, layer.shapes)
        return layout.flatten(found)
