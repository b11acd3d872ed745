"""Tests of what the parameters of a network are found to be, and where rows are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.layers import NetworkLayers, RowAxis
from tests.inference.laplace.oracle import case_expansion


def layers_of(net: nn.Module, x: Tensor, **settings) -> NetworkLayers:
    model = kn.Model(net, kn.Gaussian(1.0), **settings)
    return NetworkLayers.of(model.network, tuple(model.random_names), model.params(), x, model.buffers())


def test_layers_are_told_from_other_parameters():
    found = case_expansion("batchnorm_cnn").layers
    assert [layer.names[0] for layer in found.layers] == ["0.weight", "4.weight", "8.weight", "10.weight"]
    assert found.others == ("1.weight", "1.bias", "5.weight", "5.bias")
    assert [layer.positions for layer in found.layers] == [64, 4, 1, 1]
    assert [(layer.out, layer.width) for layer in found.layers] == [(3, 10), (4, 28), (8, 17), (3, 9)]


def test_a_weight_used_as_matrix_and_as_embedding_is_no_layer():
    found = case_expansion("tied").layers
    assert [layer.names for layer in found.layers] == [("mix.weight", "mix.bias")]
    assert found.others == ("embed.weight",)


def test_uses_of_a_shared_layer_are_positions():
    found = case_expansion("shared").layers
    assert {layer.names[0]: (len(layer.uses), layer.positions) for layer in found.layers}["2.weight"] == (2, 2)


def test_recurrent_and_attention_weights_are_layers():
    lstm, transformer = case_expansion("lstm").layers, case_expansion("transformer").layers
    assert {layer.names[0]: layer.positions for layer in lstm.layers} == {
        "lstm.weight_ih_l0": 5, "lstm.weight_hh_l0": 5, "head.weight": 1,
    }  # fmt: skip
    assert any("in_proj_weight" in layer.names[0] for layer in transformer.layers)
    assert all("norm" in name for name in transformer.others)


def test_a_bias_shared_by_two_layers_makes_neither_a_layer():
    class SharedBias(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.bias = self.first.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x)))

    found = layers_of(SharedBias(), torch.randn(4, 3))
    assert found.layers == ()
    assert set(found.others) == {"first.weight", "first.bias", "second.weight"}


class Arranged(nn.Module):
    """A linear layer on (batch, time, features), with rows in different places."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.layer = way, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps, _ = x.shape
        if self.way == "rows first":
            return self.layer(x)
        if self.way == "steps first":
            return self.layer(x.transpose(0, 1)).transpose(0, 1)
        if self.way == "rows, then steps":
            return self.layer(x.reshape(rows * steps, -1)).view(rows, steps, -1)
        return self.layer(x.transpose(0, 1).reshape(rows * steps, -1)).view(steps, rows, -1).transpose(0, 1)


@pytest.mark.parametrize("steps", [3, 4, 6])  # as many as the rows that are looked at, and others
@pytest.mark.parametrize(
    ("way", "axis"),
    [
        ("rows first", RowAxis(0, False)),
        ("steps first", RowAxis(1, False)),
        ("rows, then steps", RowAxis(0, False)),
        ("steps, then rows", RowAxis(0, True)),
    ],
)
def test_rows_are_found_wherever_they_are(way, axis, steps):
    x = torch.randn(7, steps, 2)
    found = layers_of(Arranged(way), x)
    assert found.axes == (axis,)
    assert found.layers[0].positions == steps


def test_rows_come_first_once_arranged():
    values = torch.arange(24).view(4, 3, 2)  # 4 steps, 3 rows, 2 features
    expected = values.movedim(1, 0)
    assert torch.equal(RowAxis(1, False).rows_first(values, 3), expected)
    assert torch.equal(RowAxis(0, True).rows_first(values.flatten(0, 1), 3), expected)
    assert torch.equal(RowAxis(0, False).rows_first(expected.flatten(0, 1), 3), expected)


def test_rows_that_influence_each_other_are_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) - self.layer(x).mean()

    with pytest.raises(kn.Unsupported, match=r"rows that do not influence each other.*layer\.weight"):
        layers_of(Centred(), torch.randn(4, 2))


def test_a_single_row_is_enough_to_look_at():
    found = layers_of(Arranged("steps, then rows"), torch.randn(1, 4, 2))
    assert found.axes == (RowAxis(0, True),)


class Written(nn.Module):
    """A layer of a weight ``(in, out)`` in one of several ways to write it."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor], Tensor], *bias: int):
        super().__init__()
        self.product = product
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(*bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("product", "bias", "held"),
    [
        (lambda x, w, b: torch.addmm(b, x, w), (3,), ("weight", "bias")),
        (lambda x, w, b: b.addmm(x, w), (3,), ("weight", "bias")),
        (lambda x, w, b: x @ w + b, (3,), ("weight",)),  # the sum is another operation
        (lambda x, w, b: torch.matmul(x, w) + b, (1, 3), ("weight",)),
        (lambda x, w, b: x.mm(w) * b, (3,), ("weight",)),
        (lambda x, w, b: torch.addmm(b, x, w, beta=0.5), (3,), ()),
        (lambda x, w, b: torch.addmm(b, x, w), (1, 3), ()),
        (lambda x, w, b: x @ w.tanh() + b, (3,), ()),
        (lambda x, w, b: (x @ w + b) * w.sum(), (3,), ()),
    ],
)
def test_products_from_the_right_are_layers(product, bias, held):
    net, x = Written(product, *bias), torch.randn(4, 2)
    found = layers_of(net, x)
    assert [layer.names for layer in found.layers] == ([held] if held else [])
    assert set(found.others) == {"weight", "bias"} - set(held)
    for layer in found.layers:
        values = layer.matrix(dict(net.named_parameters()))
        assert torch.equal(values[:, :2], net.weight.T) and values.shape == (layer.out, layer.width)
        again = layer.params(values)
        assert all(torch.equal(again[name], net.get_parameter(name)) for name in held)
