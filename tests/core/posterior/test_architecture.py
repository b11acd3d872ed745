"""Tests of a network's structure as JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import knowable as kn
from knowable.core.posterior.structure import _LAYERS, build, describe
from knowable.errors import DamagedArtifact
from tests.core.cases import Tied, mlp

_ARGUMENTS = {
    "Linear": (3, 2), "Bilinear": (3, 2, 4), "Embedding": (5, 3), "PixelShuffle": (2,), "ZeroPad2d": (1,),
    "LayerNorm": (3,), "RMSNorm": (3,), "GroupNorm": (2, 4), "Softmax": (1,), "LogSoftmax": (1,),
    "Polynomial": (3,), "Fourier": (5,), "RBF": (torch.zeros(4, 2),),
}  # fmt: skip


def _arguments(name: str) -> tuple:
    if name in _ARGUMENTS:
        return _ARGUMENTS[name]
    if name.startswith("Conv"):
        return (4, 6, 3)
    if "Norm" in name:
        return (4,)
    return (2,) if "Pool" in name else ()


def _again(net: nn.Module) -> nn.Module:
    return build(json.loads(json.dumps(describe(net))))


def _assert_same(first: nn.Module, second: nn.Module) -> None:
    assert repr(first) == repr(second)
    shapes = [{k: (v.shape, v.dtype) for k, v in net.state_dict().items()} for net in (first, second)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", sorted(_LAYERS))
def test_every_layer_on_the_list_is_built_again(name):
    home = next(each for each in (nn, kn, kn.features) if hasattr(each, name))
    layer = getattr(home, name)(*_arguments(name))
    _assert_same(layer, _again(layer))


SETTINGS = [
    nn.Linear(2, 3, bias=False),
    nn.Conv2d(4, 6, 3, stride=2, padding="valid", dilation=2, groups=2, bias=False, padding_mode="circular"),
    nn.Conv1d(2, 2, 3, padding="same"),
    nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1, groups=2),
    nn.LayerNorm((2, 3), elementwise_affine=False),
    nn.LayerNorm(3, eps=1e-3, bias=False),
    nn.BatchNorm1d(3, affine=False, momentum=None, eps=1e-3),
    nn.BatchNorm1d(3, track_running_stats=False),
    nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    nn.GroupNorm(2, 4, affine=False),
    nn.RMSNorm(3, eps=1e-3),
    nn.AdaptiveAvgPool2d((None, 2)),
    nn.MaxPool2d((2, 3), stride=1, padding=1, ceil_mode=True),
    nn.AvgPool2d(2, count_include_pad=False, divisor_override=3),
    nn.Upsample(scale_factor=2.0),
    nn.Upsample(size=(4, 5), mode="bilinear", align_corners=True),
    nn.Embedding(5, 3, padding_idx=0, max_norm=1.0),
    nn.PReLU(4, init=0.3),
    nn.Hardtanh(-2.0, 3.0),
    nn.Flatten(2, 3),
    nn.GELU("tanh"),
    nn.Softplus(2.0, 10.0),
    nn.LeakyReLU(0.3),
    nn.ELU(0.4),
    nn.ZeroPad2d((1, 2, 3, 4)),
    nn.Dropout(0.3),
]


@pytest.mark.parametrize("layer", SETTINGS, ids=repr)
def test_the_arguments_a_layer_was_made_with_come_back(layer):
    _assert_same(layer, _again(layer))


def test_a_tree_of_layers_is_built_again_with_its_names():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), nn.Dropout(0.1))
    net.add_module("head", nn.Linear(3, 1))
    again = _again(net)
    _assert_same(net, again)
    assert [name for name, _ in again.named_parameters()] == ["0.0.weight", "0.0.bias", "head.weight", "head.bias"]


def test_the_built_network_computes_the_same_once_it_has_the_weights():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU(), nn.Flatten(), nn.Linear(48, 2)
    ).eval()
    again = _again(net).eval()
    again.load_state_dict(net.state_dict())
    x = torch.randn(5, 1, 4, 4)
    assert torch.equal(net(x), again(x))


def test_a_layer_without_weights_may_be_used_twice():
    activation = nn.Tanh()
    net = nn.Sequential(nn.Linear(2, 3), activation, nn.Linear(3, 3), activation, nn.Linear(3, 1))
    _assert_same(net, _again(net))


class _Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x):
        return self.linear(x)


class Linear(nn.Linear):
    """Of the same name, but not the one of torch.nn."""

    def forward(self, x):
        return super().forward(x) + 1.0


def _hooked() -> nn.Module:
    net = mlp()
    net[0].register_forward_hook(lambda module, inputs, output: output + 1)
    return net


def _twice() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.Tanh(), layer)


def _tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    return net


INDESCRIBABLE = {
    "a class of one's own": _Own,
    "one inside": lambda: nn.Sequential(nn.Linear(2, 2), _Own()),
    "a subclass of the same name": lambda: Linear(2, 1),
    "a hook": _hooked,
    "a parametrised weight": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 1))),
    "a layer with weights used twice": _twice,
    "tied weights": _tied,
    "tied weights in a class": Tied,
    "a recurrent layer": lambda: nn.LSTM(2, 2),
}


@pytest.mark.parametrize("make", INDESCRIBABLE.values(), ids=INDESCRIBABLE)
def test_what_a_list_of_plain_layers_cannot_say_is_not_described(make):
    assert describe(make()) is None


def test_a_forward_that_was_replaced_is_not_described():
    net = mlp()
    net.forward = lambda x: x
    assert describe(net) is None


@pytest.mark.parametrize(
    "description",
    [
        {"layer": "Module"},
        {"layer": "Module", "arguments": {}},
        {"layer": "LSTM", "arguments": {"input_size": 2, "hidden_size": 2}},
        {"layer": "__class__", "arguments": {}},
        {"layer": "Linear", "arguments": {"in_features": "x", "out_features": 1}},
        {"layer": "Linear", "arguments": {"nonsense": 1}},
        {"layer": "Linear"},
        {"layer": "Sequential", "children": {"0": {"layer": "os.system", "arguments": {"command": "true"}}}},
        {"layer": "Sequential", "children": {"a.b": {"layer": "ReLU", "arguments": {}}}},
        {"layer": ["Linear"], "arguments": {}},
        {"layer": "Linear", "arguments": {"in_features": -1, "out_features": 1}},
        {},
        [],
    ],
)
def test_a_description_that_is_none_is_refused(description):
    with pytest.raises(DamagedArtifact, match="cannot be built"):
        build(description)


def test_a_description_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("knowable.core.posterior.structure._MOST_MODULES", 10)
    relu = {"layer": "ReLU", "arguments": {}}
    with pytest.raises(DamagedArtifact, match="too many layers"):
        build({"layer": "Sequential", "children": {str(k): relu for k in range(20)}})
    deep: dict = relu
    for _ in range(5_000):
        deep = {"layer": "Sequential", "children": {"0": deep}}
    monkeypatch.setattr("knowable.core.posterior.structure._MOST_MODULES", 10**6)
    with pytest.raises(DamagedArtifact, match="cannot be built"):
        build(deep)
