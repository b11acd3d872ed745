from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from knowable.decisions.compress.surgery import (
    Cut,
    LayerWeights,
    cut_channels,
    cut_layer,
    put_columns,
    resize_layer,
    unread_columns,
)


def _places(*kept: bool) -> torch.Tensor:
    return torch.tensor(kept)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv", "transposed"])
def test_a_cut_layer_gives_the_outputs_that_stay(kind, bias):
    make = {
        "linear": lambda: nn.Linear(4, 3, bias=bias),
        "conv": lambda: nn.Conv2d(4, 3, 2, bias=bias),
        "transposed": lambda: nn.ConvTranspose2d(4, 3, 2, bias=bias),
    }
    layer = make[kind]()
    values = torch.tensor([torch.nan, 0.7 if kind != "transposed" else 0.0, torch.nan, torch.nan], dtype=torch.double)
    shape = (5, 4) if kind == "linear" else (5, 4, 6, 6)
    x = torch.randn(shape)
    x[:, 1] = values[1]
    weight = layer.weight.transpose(0, 1) if kind == "transposed" else layer.weight
    with torch.no_grad():
        weight[:, 3] = 0.0  # input 3 is not read, input 1 constant
    expected = layer(x)[:, [0, 2]]
    inputs = Cut(_places(True, False, True, False), _places(True, False, True, False))
    outputs = Cut(_places(True, False, True), _places(True, False, True))
    cut_layer(layer, outputs, inputs, values)
    torch.testing.assert_close(layer(x[:, [0, 2]]), expected)
    assert (layer.bias is not None) == (bias or kind != "transposed")


def test_fillers_let_nothing_through():
    layer = nn.Linear(2, 2)
    cut_layer(layer, Cut(_places(True, True), _places(True, False)), Cut(_places(True, True), _places(True, False)),
              torch.tensor([torch.nan, 0.5], dtype=torch.double))  # fmt: skip
    output = layer(torch.randn(4, 2) * torch.tensor([0.0, 9.0]))
    torch.testing.assert_close(output, output[:1].expand_as(output))
    assert (output[:, 1] == 0).all()


def test_a_cut_through_what_is_needed_is_an_error():
    with pytest.raises(AssertionError, match="a needed input is cut"):
        cut_layer(nn.Linear(2, 1), Cut(_places(True), _places(True)), Cut(_places(True, False), _places(True, False)),
                  torch.full((2,), torch.nan))  # fmt: skip


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm2d(4), nn.PReLU(4), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 3, groups=4, bias=False)],
    ids=str,
)
def test_cut_channels_leave_the_others_as_they_were(module):
    x, kept = torch.randn(3, 4, 5, 5), _places(False, True, False, True)
    module.eval()
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.dim():
                value.copy_(torch.rand(value.shape) + 0.1)
    expected = module(x)[:, kept]
    cut_channels(module, kept)
    torch.testing.assert_close(module(x[:, kept]), expected)


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(4, 3, 2), nn.ConvTranspose2d(4, 3, 2)], ids=str)
def test_a_resized_layer_has_the_shapes_of_a_new_one(layer):
    resize_layer(layer, 2, 5, False)
    kernel = () if isinstance(layer, nn.Linear) else (layer.kernel_size,)
    new = type(layer)(5, 2, *kernel)
    assert layer.weight.shape == new.weight.shape and layer.bias is None
    assert repr(layer) == repr(type(layer)(5, 2, *kernel, bias=False))


def test_columns_are_chosen_where_that_pays():
    layer = nn.Linear(20, 8)
    assert unread_columns(layer) is None
    with torch.no_grad():
        layer.weight[:, 10:] = 0.0
    assert unread_columns(layer) is None  # 10 x 8 multiply-adds saved, 10 entries copied at 8 each
    with torch.no_grad():
        layer.weight[:, 9] = 0.0
    index = unread_columns(layer)
    assert index is not None and index.tolist() == list(range(9))
    x, before = torch.randn(3, 7, 20), copy.deepcopy(layer)
    torch.testing.assert_close(put_columns(layer, index)(x), before(x))


# --- layer weights ----------------------------------------------------------------------------------------------------


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
