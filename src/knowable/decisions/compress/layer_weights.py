"""A layer's weight as a matrix over units: which inputs each output reads, and what a constant input adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.decisions.compress.module_operations import TRANSPOSED, pads_with_zeros
from knowable.decisions.compress.operations import Constants, zeros_only


@dataclass(frozen=True)
class LayerWeights:
    """What matters of a linear layer or a convolution here.

    Attributes:
        reads: Whether output o has a weight other than zero on input i, ``(outputs, inputs)``.
        sums: The weights summed over the kernel, ``(outputs, inputs)``, double.
        bias: ``(outputs,)``, double; zeros if the layer has none.
        padded: Whether inputs are padded with zeros, so that constants other than zero are not constant at the border.
    """

    reads: Tensor
    sums: Tensor
    bias: Tensor
    padded: bool

    @classmethod
    def of(cls, layer: Any) -> LayerWeights:
        """The weights of a layer that is ``nn.Linear`` or a convolution without groups."""
        weight = layer.weight.detach()
        if type(layer) in TRANSPOSED:
            weight = weight.transpose(0, 1)  # inputs come first there
        weight = weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(-1)  # (outputs, inputs, kernel)
        bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
        padded = not isinstance(layer, nn.Linear) and pads_with_zeros(layer)
        return cls((weight != 0).any(-1), weight.double().sum(-1), bias.double(), padded)

    def foldable(self, inputs: Constants) -> Constants:
        """The constants among the inputs whose effect is exactly a shift of the bias; NaN for the others."""
        return zeros_only(inputs) if self.padded else inputs

    def constants(self, inputs: Constants) -> Constants:
        r"""Outputs that are constant: :math:`b_o + \sum_i c_i \sum_k w_{oik}`, if all that o reads is constant."""
        known = self.foldable(inputs)
        unsettled = (self.reads & known.isnan()).any(1)
        return (self.bias + self.sums @ known.nan_to_num(0.0)).masked_fill(unsettled, torch.nan)
