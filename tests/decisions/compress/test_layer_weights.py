"""Tests of layers as matrices; the layer run on constant inputs is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from knowable.decisions.compress.surgery import LayerWeights

LAYERS = [
    nn.Linear(3, 5),
    nn.Linear(3, 5, bias=False),
    nn.Conv2d(3, 5, 3),
    nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"),
    nn.Conv1d(3, 5, 2, dilation=2),
    nn.Conv2d(3, 5, 1, padding="valid"),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_constant_inputs_give_constant_outputs(layer):
    weights = LayerWeights.of(layer)
    values = torch.tensor([0.5, -2.0, 0.0], dtype=torch.double)
    shape = (2, 3, *[6] * (layer.weight.dim() - 2))
    x = values.view(1, 3, *[1] * (len(shape) - 2)).expand(shape)
    output = layer.double()(x).transpose(0, 1).flatten(1)
    layer.float()
    expected = weights.constants(values).unsqueeze(1).expand_as(output)
    torch.testing.assert_close(output.detach(), expected, rtol=1e-6, atol=1e-6)


def test_outputs_are_unknown_that_read_what_is_unknown():
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight[0, 1] = 0.0
    values = LayerWeights.of(layer).constants(torch.tensor([1.0, torch.nan, 0.0], dtype=torch.double))
    assert values.isnan().tolist() == [False, True]


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 3, 3, padding=1), nn.ConvTranspose2d(2, 3, 2)], ids=str)
def test_only_zeros_can_be_folded_where_the_border_is_padded(layer):
    weights = LayerWeights.of(layer)
    assert weights.reads.shape == weights.sums.shape == (3, 2)
    assert weights.foldable(torch.tensor([0.0, 1.0])).isnan().tolist() == [False, True]
