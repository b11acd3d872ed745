"""Tests of units: which are the same, which are joined, which must stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from knowable.decisions.compress.dependencies import UnitDependencies
from knowable.decisions.compress.graph import record_shapes, trace
from tests.decisions.compress.cases import make


def wired(net: nn.Module, x: Tensor) -> tuple[UnitDependencies, dict[str, list[int]]]:
    """The dependencies, and the roots of the units of every node by its name."""
    graph = trace(net.eval())
    assert graph is not None
    record_shapes(graph, x)
    dependencies = UnitDependencies.of(graph)
    roots = dependencies.roots()
    return dependencies, {node.name: roots[wires.units].tolist() for node, wires in dependencies.units_of.items()}


def test_units_go_through_activations_and_are_repeated_by_a_flattening():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    _, units = wired(net, torch.randn(2, 1, 4, 4))
    one, two = units["_0"]
    assert units["_1"] == [one, two]
    assert units["_2"] == [one] * 4 + [two] * 4
    assert len(set(units["_3"]) | {one, two}) == 5


def test_units_behind_a_permutation_alternate_when_flattened():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).permute(0, 2, 3, 1).flatten(1)

    dependencies, units = wired(Last(), torch.randn(2, 1, 4, 4))
    assert units["flatten"] == units["conv"] * 4
    assert dependencies.pinned().all()  # it is the output


def test_sums_join_units_and_concatenations_list_them(generator):
    net, x = make("residual", generator=generator)
    _, units = wired(net, x)
    assert units["norm"] == units["skip"] == units["four"] == units["three"][:0] + units["add"]
    net, x = make("dense", generator=generator)
    dependencies, units = wired(net, x)
    assert units["cat"][1:] == units["first"] and units["cat_1"] == units["cat"] + units["second"]
    node = next(node for node in dependencies.units_of if node.name == "cat")
    assert dependencies.pinned()[dependencies.units_of[node].units].tolist() == [
        True,
        False,
        False,
        False,
        False,
    ]  # the input stays


def test_what_goes_into_the_unknown_is_pinned_and_noted(generator):
    net, x = make("recurrent", generator=generator)
    dependencies, _ = wired(net, x)
    pinned = {
        node.name: dependencies.pinned()[wires.units].all().item() for node, wires in dependencies.units_of.items()
    }
    assert pinned["embed"] and pinned["wide"] and pinned["head"]
    assert [note.split()[0] for note in dependencies.notes] == ["lstm", "norm"]


def test_a_layer_along_another_dimension_reads_all(generator):
    net, x = make("tokens", generator=generator)
    dependencies, _ = wired(net, x)
    read = {node.name for node in dependencies.inputs}
    assert read == {"mix", "head"} or read == {"mix"}
    assert "over_tokens" not in read
