"""Tests of what layers do to constants; the oracle is the layer itself, run on channels that are constant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import Layer, Opaque, Pass, Shift, record_shapes, trace
from knowable.decisions.compress.module_operations import Uses, module_operation

VALUES = torch.tensor([0.0, 1.5, -0.7, 0.3, -2.0, 0.0])
CHANNELS = len(VALUES)

IMAGES = [
    *(nn.ReLU(inplace=True), nn.GELU(), nn.Sigmoid(), nn.Softplus(), nn.Hardtanh(-0.5, 0.2), nn.Identity()),
    *(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.PReLU(), nn.PReLU(CHANNELS), nn.Threshold(0.1, 20.0), nn.ELU()),
    *(nn.MaxPool2d(2, padding=1), nn.AvgPool2d(2), nn.AvgPool2d(2, padding=1), nn.AvgPool2d(3, 2, ceil_mode=True)),
    *(nn.AvgPool2d(2, divisor_override=3), nn.AvgPool2d(2, padding=1, count_include_pad=False)),
    *(nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d((1, 2)), nn.ZeroPad2d(1), nn.ConstantPad2d(1, 2.0)),
    *(nn.ReflectionPad2d(1), nn.ReplicationPad2d((0, 1, 2, 0)), nn.Upsample(scale_factor=2)),
    *(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(scale_factor=2, mode="bicubic")),
    *(nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS, affine=False), Gates(CHANNELS), Shift(VALUES.clone(), 1)),
    nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
    nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, padding=1),
    nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS, padding="same", padding_mode="replicate", bias=False),
]


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def operation_of(module: nn.Module, x: Tensor):
    graph = trace(Wrapped(module.eval()))
    assert isinstance(graph, fx.GraphModule)
    record_shapes(graph, x)
    node = next(node for node in graph.graph.nodes if node.op == "call_module")
    return module_operation(node, Uses(graph))


def _unsettle(module: nn.Module) -> None:
    """Statistics, scales and gates that are not those of a start; some of them zero."""
    with torch.no_grad():
        for name, value in module.named_buffers():
            if name.endswith(("mean", "var")):
                value.copy_(torch.linspace(0.2, 2.0, CHANNELS))
        for name, value in module.named_parameters():
            if value.dim() == 1 and len(value) == CHANNELS:
                value.copy_(torch.linspace(-1.0, 1.5, CHANNELS))
                if name.endswith(("weight", "gate")):
                    value[2:4] = 0.0
            elif value.dim() > 1:
                value[3] = 0.0


@pytest.mark.parametrize("module", IMAGES, ids=str)
def test_constants_become_what_the_layer_makes_of_them(module):
    _unsettle(module)
    x = VALUES.view(1, -1, 1, 1).expand(2, -1, 5, 5).clone()
    operation = operation_of(module, x)
    assert isinstance(operation, Pass)
    claimed = operation.constant(VALUES.double())
    with torch.no_grad():
        flat = module.double()(x.double()).transpose(0, 1).flatten(1)  # (channels, everything else)
    module.float()
    steady = (flat - flat[:, :1]).abs().amax(1) < 1e-9
    assert (steady | claimed.isnan()).all()
    known = ~claimed.isnan()
    torch.testing.assert_close(claimed[known], flat[known, 0], rtol=1e-9, atol=1e-9)
    assert known[0] or not steady[0] or isinstance(module, nn.ConstantPad2d)  # zeros are the ones that matter most


@pytest.mark.parametrize("module", IMAGES, ids=str)
def test_what_varies_stays_unknown_unless_it_is_multiplied_by_zero(module):
    _unsettle(module)
    x = torch.randn(2, CHANNELS, 5, 5)
    claimed = operation_of(module, x).constant(torch.full((CHANNELS,), torch.nan, dtype=torch.double))
    with torch.no_grad():
        flat = module(x).transpose(0, 1).flatten(1)
    steady = (flat - flat[:, :1]).abs().amax(1) < 1e-6
    assert torch.equal(~claimed.isnan(), steady)


@pytest.mark.parametrize("module", [nn.Linear(6, 3), nn.Conv2d(6, 3, 3), nn.ConvTranspose2d(6, 3, 2)], ids=str)
def test_layers_are_layers(module):
    x = torch.randn(2, 6) if isinstance(module, nn.Linear) else torch.randn(2, 6, 5, 5)
    assert isinstance(operation_of(module, x), Layer)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(6, 6, 3, groups=2),
        nn.GroupNorm(2, 6),
        nn.InstanceNorm2d(6),
        nn.BatchNorm2d(6, track_running_stats=False),
        nn.Softmax(1),
        nn.PixelShuffle(1),
        nn.Conv2d(6, 12, 3, groups=6),
    ],
    ids=str,
)
def test_what_mixes_channels_or_is_not_plain_is_opaque(module):
    found = operation_of(module, torch.randn(2, 6, 5, 5))
    assert isinstance(found, Opaque)
