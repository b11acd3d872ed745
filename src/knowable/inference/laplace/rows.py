"""Gradients of each row's outputs in the network's parameters, one direction of the outputs at a time.

For layers they stay factored (gradients and activations at every position); for other parameters they are computed row
by row. A Jacobian for all outputs is never held: whoever needs several directions asks for one after the other.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, vmap

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
        self.recording = Recording(model, anatomy.names, params, x, buffers)

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

    def gradients(self, cotangent: Tensor) -> list[Tensor]:
        """For each layer the gradients of outputs times ``cotangent`` at its outputs, ``(rows, positions, out)``."""
        found = self.recording.gradients(cotangent)
        return [self.anatomy.gradients(found, layer, len(self.x)) for layer in self.anatomy.layers]

    def others(self, cotangent: Tensor) -> Params:
        """For each other parameter the gradient of every row's outputs times ``cotangent``, ``(rows, *shape)``."""
        if not self.anatomy.others:
            return {}
        network = self.model.network_params(self.params)
        asked = {name: network[name].detach() for name in self.anatomy.others}

        def of_one_row(values: Params, row: Tensor, direction: Tensor) -> Tensor:
            output = self.model.network({**network, **values}, row.unsqueeze(0), buffers=self.buffers)
            return (output[0] * direction).sum()

        gradient = grad(of_one_row)
        with differentiable():
            try:
                return vmap(gradient, in_dims=(None, 0, 0))(asked, self.x, cotangent)
            except (RuntimeError, NotImplementedError):  # an operation that cannot be batched
                each = [gradient(asked, row, way) for row, way in zip(self.x, cotangent, strict=True)]
                return {name: torch.stack([found[name] for found in each]) for name in asked}

    def flat(self, cotangent: Tensor, layout: Layout) -> Tensor:
        """Gradients of every row's outputs times ``cotangent`` in all parameters, ``(rows, D)``."""
        found = self.others(cotangent)
        for layer, a, g in zip(self.anatomy.layers, self.activations, self.gradients(cotangent), strict=True):
            matrix = g.mT @ a  # (rows, out, in): summed over positions
            if len(layer.names) == 2:
                found[layer.names[1]] = matrix[..., -1]
                matrix = matrix[..., :-1]
            found[layer.names[0]] = matrix.reshape(len(a), *layer.shapes[0])
        return layout.flatten(found)
