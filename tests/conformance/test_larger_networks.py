"""What large networks do (graphs, low precision, recomputation, outputs with names), with one method of each kind."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import knowable as kn
from knowable.core.support.randomness import own_randomness
from knowable.testing import NetworkCase, Subject
from knowable.testing.checks.networks import check_case

QUICK = {"epochs": 2, "batch_size": 8}
CHAINS = {"chains": 2, "draws": 3, "warmup": 4, "start": "network"}
METHODS = [
    kn.MAP(**QUICK), kn.Laplace(**QUICK), kn.MeanFieldVI(**QUICK), kn.NaturalVI(**QUICK),
    kn.SWAG(**QUICK, snapshots=3, rank=2), kn.MCDropout(**QUICK), kn.DeepEnsemble(2, **QUICK),
    kn.SGLD(**CHAINS, batch_size=8, steps=2),
]  # fmt: skip
SOON = ("MAP", "Laplace", "MeanFieldVI")  # in the quick run


# --- graphs ----------------------------------------------------------------------------------------------------------


class GraphNetwork(nn.Module):
    """Two layers over the nodes of a graph, with a label for every node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Logits ``(graphs, classes, nodes)`` of nodes ``(graphs, nodes, features)``."""
        return (edges @ self.second(torch.relu(edges @ self.first(nodes)))).mT


class OneGraph(GraphNetwork):
    """The same with the edges of one graph inside."""

    edges: Tensor

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)

    def forward(self, nodes: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(nodes, self.edges)


class EdgeList(nn.Module):
    """One graph by a list of edges; several rows are copies of it side by side."""

    edges: Tensor

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)
        self.register_buffer("edges", edges)

    def forward(self, nodes: Tensor) -> Tensor:
        graphs, count, _ = nodes.shape
        start = count * torch.arange(graphs, device=nodes.device)
        edges, values = (self.edges.unsqueeze(1) + start.view(1, -1, 1)).flatten(1), nodes.flatten(0, 1)
        for layer in (self.first, self.second):
            seen = layer(values)
            values = torch.tanh(seen.index_add(0, edges[0], seen[edges[1]]))
        return values.view(graphs, count, -1).mT


def random_edges(*shape: int) -> Tensor:
    """Means over neighbours: rows that sum to one."""
    n = shape[-1]
    linked = (torch.rand(*shape, n) < 0.3).float() + torch.eye(n)
    return linked / linked.sum(-1, keepdim=True)


def node_labels(nodes: Tensor) -> Tensor:
    """Labels of a training mask of half of the nodes."""
    masked = torch.arange(nodes.shape[1]) % 2 == 0
    return (nodes.sum(-1) > 0).long().where(masked, -100)


def graphs() -> NetworkCase:
    nodes = torch.randn(16, 5, 3)
    inputs = {"nodes": nodes, "edges": random_edges(16, 5)}
    return NetworkCase("graphs", GraphNetwork(), kn.Categorical(ignore_index=-100), inputs, node_labels(nodes))


def one_graph() -> NetworkCase:
    nodes = torch.randn(1, 12, 3)  # one row
    net = OneGraph(random_edges(12))
    return NetworkCase("one_graph", net, kn.Categorical(ignore_index=-100), nodes, node_labels(nodes))


def edge_list() -> NetworkCase:
    nodes, net = torch.randn(1, 12, 3), EdgeList(torch.randint(0, 12, (2, 20)))
    return NetworkCase("edge_list", net, kn.Categorical(ignore_index=-100), nodes, node_labels(nodes))


# --- precision, recomputation, outputs -------------------------------------------------------------------------------


class MixedPrecision(nn.Module):
    """A layer in bfloat16 and a head in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8).bfloat16(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.bfloat16())).float())


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen: Any = checkpoint(self.block, x, use_reentrant=False)
        return self.head(seen)


@dataclass
class NamedOutput(OrderedDict):
    """A mapping and a dataclass, as outputs of transformers are: what is None is no entry."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)


class Named(nn.Module):
    """A network that returns :class:`NamedOutput`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, input_values: Tensor) -> NamedOutput:
        hidden = torch.tanh(self.body(input_values))
        return NamedOutput(logits=self.head(hidden), hidden=(hidden,))


def regression() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 3)
    return x, x.sum(1, keepdim=True).sin()


def mixed_dtypes() -> NetworkCase:
    return NetworkCase("mixed_dtypes", MixedPrecision(), kn.Gaussian(0.3), *regression())


def autocast() -> NetworkCase:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return NetworkCase("autocast", net, kn.Gaussian(), *regression(), autocast=torch.bfloat16)


def recomputed() -> NetworkCase:
    return NetworkCase("recomputed", Recomputed(), kn.Gaussian(0.3), *regression())


def named_output() -> NetworkCase:
    x, y = regression()
    labels = (y[:, 0] > 0).long().where(torch.arange(16) % 4 > 0, -100)
    likelihood = kn.Categorical(ignore_index=-100)
    return NetworkCase("named_output", Named(), likelihood, {"input_values": x}, labels, output="logits")


CASES = [graphs, one_graph, edge_list, mixed_dtypes, autocast, recomputed, named_output]


@pytest.fixture(autouse=True)
def _short_training(monkeypatch):
    """A few steps before chains, and few draws for the bound at the end of a variational fit, will do here."""
    monkeypatch.setattr("knowable.inference.sampling.initial_positions._STEPS", 20)
    monkeypatch.setattr("knowable.inference.variational.method._ELBO_ROWS", 400)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "method",
    [pytest.param(each, marks=() if type(each).__name__ in SOON else pytest.mark.slow) for each in METHODS],
    ids=lambda method: type(method).__name__,
)
def test_networks_as_large_ones_are_fitted(method, case):
    with own_randomness(0):
        found = case()
    check_case(Subject(method), found)


class FlatEdgeList(EdgeList):
    """The same with nodes as rows."""

    def forward(self, nodes: Tensor) -> Tensor:
        return super().forward(nodes.unsqueeze(0))[0].T


@pytest.mark.parametrize("method", [METHODS[0], METHODS[1], METHODS[-1]], ids=lambda method: type(method).__name__)
def test_a_graph_with_nodes_as_rows_is_refused_with_the_way_that_works(method):
    net = FlatEdgeList(torch.tensor([[11, 3], [2, 7]]))
    with pytest.raises(kn.InvalidData, match=r"all 12 rows together, but not 3 of them.*\(1, nodes, \.\.\.\)"):
        method.fit(kn.Model(net, kn.Categorical()), (torch.randn(12, 3), torch.arange(12) % 2))
