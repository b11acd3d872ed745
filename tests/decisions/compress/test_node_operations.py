from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import (
    BinaryOp,
    ChannelShift,
    ConcatOp,
    FlattenOp,
    LayerOp,
    OpaqueOp,
    PermuteOp,
    ShapeQuery,
    UnitwiseOp,
    record_shapes,
    trace,
)
from knowable.decisions.compress.node_operations import ModuleUses, function_operation, module_operation

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
    *(
        nn.BatchNorm2d(CHANNELS),
        nn.BatchNorm2d(CHANNELS, affine=False),
        Gates(CHANNELS),
        ChannelShift(VALUES.clone(), 1),
    ),
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
    return module_operation(node, ModuleUses(graph))


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
    assert isinstance(operation, UnitwiseOp)
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
    assert isinstance(operation_of(module, x), LayerOp)


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
    assert isinstance(found, OpaqueOp)


# --- function operations ----------------------------------------------------------------------------------------------


FOUR = torch.tensor([0.0, 1.5, -0.7, 0.3], dtype=torch.double)


def operations_of(function, x: Tensor):
    class Calls(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    graph = trace(Calls())
    assert graph is not None
    record_shapes(graph, x)
    return [function_operation(node) for node in graph.graph.nodes if node.op in ("call_function", "call_method")]


UNIT_BY_UNIT = {
    "F.relu": F.relu,
    "torch.tanh": torch.tanh,
    "x.sigmoid": lambda x: x.sigmoid(),
    "F.gelu": lambda x: F.gelu(x, approximate="tanh"),
    "F.leaky_relu": lambda x: F.leaky_relu(x, 0.3),
    "torch.clamp": lambda x: torch.clamp(x, -0.1, 0.2),
    "neg": lambda x: -x,
    "scalars": lambda x: 3.0 - x,
    "times": lambda x: x * 0.5,
    "over": lambda x: 1.0 / (x + 4.0),
    "square": lambda x: x * x,
    "F.dropout": lambda x: F.dropout(x, 0.5, training=False),
    "F.max_pool2d": lambda x: F.max_pool2d(x, 2),
    "F.avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "F.avg_pool2d padded": lambda x: F.avg_pool2d(x, 2, padding=1),
    "F.adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "F.adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "F.interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "F.interpolate bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "contiguous": lambda x: x.contiguous(),
}


@pytest.mark.parametrize("function", UNIT_BY_UNIT.values(), ids=UNIT_BY_UNIT)
def test_constants_become_what_the_function_makes_of_them(function):
    x = FOUR.view(1, -1, 1, 1).expand(2, -1, 4, 4).clone()
    claimed = FOUR
    for operation in operations_of(function, x):
        assert isinstance(operation, UnitwiseOp)
        claimed = operation.constant(claimed)
    flat = function(x).transpose(0, 1).flatten(1)
    known = ~claimed.isnan()
    assert known[0]
    torch.testing.assert_close(claimed[known].unsqueeze(1).expand(-1, flat.shape[1]), flat[known])
    unknown = torch.full_like(FOUR, torch.nan)
    for operation in operations_of(function, x):
        unknown = operation.constant(unknown)
    assert unknown.isnan().all()


def test_sums_and_products_join():
    def both(x: Tensor) -> Tensor:
        return torch.add(x.relu() * x.tanh(), x)

    _, _, product, total = operations_of(both, torch.randn(2, 4))
    assert isinstance(product, BinaryOp) and isinstance(total, BinaryOp) and total.adds and not product.adds
    left, right = torch.tensor([0.0, 2.0, torch.nan, torch.nan]), torch.tensor([torch.nan, 3.0, 0.0, 1.0])
    assert product.combine(left, right).nan_to_num(-1).tolist() == [0.0, 6.0, 0.0, -1.0]
    assert total.combine(left, right).nan_to_num(-1).tolist() == [-1.0, 5.0, -1.0, -1.0]


def test_a_sum_with_a_weight_is_not_taken_for_a_plain_one():
    _, total = operations_of(lambda x: torch.add(x.relu(), x, alpha=2), torch.randn(2, 4))
    assert isinstance(total, BinaryOp) and not total.adds
    assert total.combine(torch.ones(1), torch.ones(1)).item() == 3.0


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.flatten(x, 1), (1, 3, None)),
        (lambda x: x.flatten(2), (2, 3, None)),
        (lambda x: x.view(-1, 60), (1, 3, (-1, 60))),
        (lambda x: x.reshape((2, -1)), (1, 3, (2, -1))),
        (lambda x: x.view(2, 3, 20), (2, 3, (2, 3, 20))),
    ],
)
def test_views_that_flatten_are_recognised(function, expected):
    (found,) = operations_of(function, torch.randn(2, 3, 4, 5))
    assert isinstance(found, FlattenOp)
    assert (found.start, found.end, found.sizes) == expected


@pytest.mark.parametrize(
    ("function", "order"),
    [
        (lambda x: x.permute(0, 2, 3, 1), (0, 2, 3, 1)),
        (lambda x: torch.permute(x, (0, 3, 1, 2)), (0, 3, 1, 2)),
        (lambda x: x.transpose(1, -1), (0, 3, 2, 1)),
        (lambda x: x.mean((2, 3)), (0, 1)),
        (lambda x: torch.mean(x, dim=-1), (0, 1, 2)),
        (lambda x: x.amax((2, 3), keepdim=True), (0, 1, -1, -1)),
    ],
)
def test_dimensions_that_move_are_followed(function, order):
    (found,) = operations_of(function, torch.randn(2, 3, 4, 5))
    assert isinstance(found, PermuteOp)
    assert found.order == order


def test_concatenations_and_questions_are_recognised():
    first, *_ = operations_of(lambda x: torch.cat([x, x], -1), torch.randn(2, 4))
    assert isinstance(first, ConcatOp) and first.dim == 1
    first, *_ = operations_of(lambda x: x * x.size(0), torch.randn(2, 4))
    assert isinstance(first, ShapeQuery)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(4, -1),  # across the batch
        lambda x: x.sum(1),
        lambda x: torch.softmax(x, 1),
        lambda x: x[:, :2],
        lambda x: x.roll(1, 1),
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: torch.cumsum(x, 1),
        lambda x: x.view(2, 2, 2),
    ],
)
def test_everything_else_is_opaque(function):
    assert isinstance(operations_of(function, torch.randn(2, 4))[0], OpaqueOp)
