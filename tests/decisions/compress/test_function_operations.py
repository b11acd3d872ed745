"""Tests of functions and methods; the oracle is the function, run on channels that are constant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.decisions.compress.function_operations import function_operation
from knowable.decisions.compress.graph import Ask, Concatenate, Join, Merge, Move, Opaque, Pass, record_shapes, trace

VALUES = torch.tensor([0.0, 1.5, -0.7, 0.3], dtype=torch.double)


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
    x = VALUES.view(1, -1, 1, 1).expand(2, -1, 4, 4).clone()
    claimed = VALUES
    for operation in operations_of(function, x):
        assert isinstance(operation, Pass)
        claimed = operation.constant(claimed)
    flat = function(x).transpose(0, 1).flatten(1)
    known = ~claimed.isnan()
    assert known[0]
    torch.testing.assert_close(claimed[known].unsqueeze(1).expand(-1, flat.shape[1]), flat[known])
    unknown = torch.full_like(VALUES, torch.nan)
    for operation in operations_of(function, x):
        unknown = operation.constant(unknown)
    assert unknown.isnan().all()


def test_sums_and_products_join():
    def both(x: Tensor) -> Tensor:
        return torch.add(x.relu() * x.tanh(), x)

    _, _, product, total = operations_of(both, torch.randn(2, 4))
    assert isinstance(product, Join) and isinstance(total, Join) and total.adds and not product.adds
    left, right = torch.tensor([0.0, 2.0, torch.nan, torch.nan]), torch.tensor([torch.nan, 3.0, 0.0, 1.0])
    assert product.combine(left, right).nan_to_num(-1).tolist() == [0.0, 6.0, 0.0, -1.0]
    assert total.combine(left, right).nan_to_num(-1).tolist() == [-1.0, 5.0, -1.0, -1.0]


def test_a_sum_with_a_weight_is_not_taken_for_a_plain_one():
    _, total = operations_of(lambda x: torch.add(x.relu(), x, alpha=2), torch.randn(2, 4))
    assert isinstance(total, Join) and not total.adds
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
    assert isinstance(found, Merge)
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
    assert isinstance(found, Move)
    assert found.order == order


def test_concatenations_and_questions_are_recognised():
    first, *_ = operations_of(lambda x: torch.cat([x, x], -1), torch.randn(2, 4))
    assert isinstance(first, Concatenate) and first.dim == 1
    first, *_ = operations_of(lambda x: x * x.size(0), torch.randn(2, 4))
    assert isinstance(first, Ask)


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
    assert isinstance(operations_of(function, torch.randn(2, 4))[0], Opaque)
