from __future__ import annotations

import pytest
import torch
from torch import nn

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import (
    ChannelShift,
    ColumnSelection,
    applied,
    combined,
    record_shapes,
    same,
    shape_of,
    trace,
    unknown,
    zeros_only,
)
from tests.decisions.compress.cases import NETWORKS, Branching, Looking, make


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_computes_what_the_network_does_over_its_own_modules(name, generator):
    net, x = make(name, generator=generator)
    graph = trace(net)
    assert graph is not None
    with torch.no_grad():
        assert torch.equal(graph(x), net(x))
    own = {id(module) for module in net.modules()}
    leaves = [graph.get_submodule(node.target) for node in graph.graph.nodes if node.op == "call_module"]
    assert all(id(leaf) in own for leaf in leaves)


def test_shapes_are_those_of_the_tensors(generator):
    net, x = make("lenet", generator=generator)
    graph = trace(net)
    assert graph is not None
    record_shapes(graph, x)
    expected, value = [], x[:2]
    for layer in net:
        value = layer(value)
        expected.append(tuple(value.shape))
    assert [shape_of(node) for node in graph.graph.nodes if node.op == "call_module"] == expected


def test_a_part_that_cannot_be_followed_is_one_node_and_a_whole_that_cannot_is_none():
    graph = trace(Branching())
    assert graph is not None
    targets = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert targets == ["first", "before", "inner", "last"]
    assert trace(Looking()) is None


def test_gates_are_a_layer():
    graph = trace(nn.Sequential(nn.Linear(2, 3), Gates(3)))
    assert graph is not None
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"] == ["0", "1"]


# --- added layers -----------------------------------------------------------------------------------------------------


def test_columns_are_those_of_the_last_dimension():
    x = torch.arange(12.0).view(2, 2, 3)
    assert torch.equal(ColumnSelection(torch.tensor([2, 0]))(x), x[..., [2, 0]])
    assert str(ColumnSelection(torch.tensor([2, 0]))) == "ColumnSelection(2)"


@pytest.mark.parametrize(("shape", "dim"), [((2, 3), 1), ((2, 3, 4, 4), 1), ((2, 5, 3), 2)])
def test_a_shift_adds_to_its_own_dimension(shape, dim):
    x, shift = torch.randn(shape), torch.tensor([1.0, -2.0, 0.5])
    expected = (x.movedim(dim, -1) + shift).movedim(-1, dim)
    assert torch.equal(ChannelShift(shift, dim)(x), expected)
    assert str(ChannelShift(shift, dim)) == f"ChannelShift(3, dim={dim})"


# --- operations -------------------------------------------------------------------------------------------------------


NAN = torch.nan
VALUES = torch.tensor([0.0, 2.0, -1.0, NAN], dtype=torch.double)


def _shown(values: torch.Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def test_constants_stay_or_only_zeros_do_or_none():
    assert _shown(same(VALUES)) == [0.0, 2.0, -1.0, None]
    assert _shown(zeros_only(VALUES)) == [0.0, None, None, None]
    assert _shown(unknown(VALUES)) == [None] * 4


def test_a_function_applies_to_what_is_known_and_its_infinities_are_unknown():
    assert _shown(applied(torch.square)(VALUES)) == [0.0, 4.0, 1.0, None]
    assert _shown(applied(torch.log)(VALUES))[0] is None
    assert _shown(applied(torch.ones_like)(VALUES)) == [1.0, 1.0, 1.0, None]  # it may not be for what is not known
    before = VALUES.clone()
    applied(torch.relu_)(VALUES)
    assert torch.equal(
        before,
        VALUES,
    ) or torch.equal(before.nan_to_num(9), VALUES.nan_to_num(9))


def test_two_constants_make_one_and_zero_times_anything_is_zero():
    other = torch.tensor([NAN, 3.0, NAN, 0.0], dtype=torch.double)
    assert _shown(combined(torch.add, product=False)(VALUES, other)) == [None, 5.0, None, None]
    assert _shown(combined(torch.mul, product=True)(VALUES, other)) == [0.0, 6.0, None, 0.0]
    assert _shown(combined(torch.div, product=False)(other, VALUES)) == [None, 1.5, None, None]
