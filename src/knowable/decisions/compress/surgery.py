"""Layers made smaller in place: rows and columns of weights are removed, and biases absorb constant inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import ChannelShift, ColumnSelection, Constants, zeros_only
from knowable.decisions.compress.node_operations import BATCH_NORMS, TRANSPOSED, pads_with_zeros


@dataclass(frozen=True)
class Cut:
    """Which inputs or outputs of a layer stay, and which of those the output depends on, ``(count,)`` each."""

    kept: Tensor
    needed: Tensor


def cut_layer(layer: Any, outputs: Cut, inputs: Cut, constants: Constants) -> None:
    r"""Remove outputs and inputs of a linear layer or convolution.

    The bias absorbs constant inputs that are removed: :math:`b_o + \sum_i c_i \sum_k w_{oik}`.
    """
    weights = LayerWeights.of(layer)
    gone = ~inputs.needed
    known = weights.foldable(constants)
    assert not (weights.reads[outputs.needed][:, gone] & known[gone].isnan()).any(), "a needed input is cut"
    shift = weights.sums[:, gone] @ known[gone].nan_to_num(0.0)
    bias = torch.where(outputs.needed, weights.bias + shift, 0.0)[outputs.kept]
    weight = layer.weight.detach().clone()
    weight = weight.transpose(0, 1) if type(layer) in TRANSPOSED else weight
    weight[~outputs.needed] = 0.0
    weight[:, gone] = 0.0
    weight = weight[outputs.kept][:, inputs.kept]
    has_bias = layer.bias is not None or bool(bias.any())
    _put(layer, weight, bias.to(weight) if has_bias else None)


def resize_layer(layer: Any, outputs: int, inputs: int, bias: bool) -> None:
    """Give a layer these numbers of outputs and inputs, with zeros for weights."""
    weight = layer.weight.detach()
    _put(layer, weight.new_zeros((outputs, inputs, *weight.shape[2:])), weight.new_zeros(outputs) if bias else None)


def _put(layer: Any, weight: Tensor, bias: Tensor | None) -> None:
    outputs, inputs = weight.shape[:2]
    weight = weight.transpose(0, 1) if type(layer) in TRANSPOSED else weight
    layer.weight = nn.Parameter(weight.contiguous())
    layer.bias = None if bias is None else nn.Parameter(bias)
    if isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = outputs, inputs
    else:
        layer.out_channels, layer.in_channels = outputs, inputs


def cut_channels(module: nn.Module, kept: Tensor) -> None:
    """Remove channels of a module that treats each by itself; ``kept`` may also be their indices."""
    for name, value in [*module.named_parameters(recurse=False)]:
        setattr(module, name, nn.Parameter(value.detach()[kept].clone()))
    for name, value in [*module.named_buffers(recurse=False)]:
        if value is not None and value.dim():  # num_batches_tracked has none
            setattr(module, name, value[kept].clone())
    count = int(kept.sum()) if kept.dtype == torch.bool else len(kept)
    for name in _counts_of(module):
        setattr(module, name, count)


def _counts_of(module: nn.Module) -> tuple[str, ...]:
    """The attributes in which a module has its number of channels."""
    if type(module) in BATCH_NORMS:
        return ("num_features",)
    if isinstance(module, nn.PReLU):
        return ("num_parameters",)
    if isinstance(module, ChannelShift):
        return ()
    return ("units",) if isinstance(module, Gates) else ("in_channels", "out_channels", "groups")


_COPYING = 8  # multiply-adds that take as long as copying one entry


def unread_columns(layer: nn.Linear) -> Tensor | None:
    """Indices of the inputs a linear layer reads, if selecting them in front of it saves time.

    Copying a kept entry costs about as much as eight multiply-adds, and each entry left out saves one for every output.
    """
    read = (layer.weight.detach() != 0).any(0)
    read[0] |= not read.any()
    kept, gone = int(read.sum()), int((~read).sum())
    return read.nonzero().squeeze(1) if gone * layer.out_features > _COPYING * kept else None


def put_columns(layer: nn.Linear, index: Tensor) -> nn.Sequential:
    """The layer behind a selection of its inputs."""
    _put(layer, layer.weight.detach()[:, index], None if layer.bias is None else layer.bias.detach())
    return nn.Sequential(ColumnSelection(index), layer)


# --- weights as matrices over units ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerWeights:
    """Which inputs each output of a linear layer or convolution reads, and what a constant input adds to it."""

    reads: Tensor  # whether output o has a nonzero weight on input i, (outputs, inputs)
    sums: Tensor  # the weights summed over the kernel, (outputs, inputs), double
    bias: Tensor  # (outputs,), double; zeros if the layer has none
    padded: bool  # with zeros, so that constants other than zero are not constant at the border

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
