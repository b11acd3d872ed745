"""Tests of tracing: shapes are those of the real tensors, and what cannot be followed is one node."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import record_shapes, shape_of, trace
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
