"""Tests of constants through whole networks; outputs over many inputs are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from knowable.decisions.compress.graph import record_shapes, trace
from knowable.decisions.compress.liveness import find_constants
from knowable.decisions.compress.surgery import LayerWeights
from knowable.decisions.compress.wiring import Wiring
from tests.decisions.compress.cases import NETWORKS, make, pruned, random_masks


class Watch(fx.Interpreter):
    """Keeps a copy of every tensor, before anything can overwrite it."""

    def run_node(self, n):
        found = super().run_node(n)
        if isinstance(found, torch.Tensor):
            n.meta["value"] = found.clone()
        return found


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "shared"])  # it overwrites values on purpose
def test_units_said_to_be_constant_have_that_value_in_every_row_and_pixel(name, share, generator):
    net, x = make(name, generator=generator)
    graph = trace(pruned(net, random_masks(net, share, generator=generator)))
    assert graph is not None
    record_shapes(graph, x)
    wiring = Wiring.of(graph)
    weights = {layer.path: LayerWeights.of(graph.get_submodule(layer.path)) for _, layer in wiring.layers()}
    constants = find_constants(wiring, weights)
    with torch.no_grad():
        Watch(graph).run(torch.randn((6, *x.shape[1:]), generator=generator))
    found = 0
    for node, values in constants.items():
        flat = node.meta["value"].movedim(wiring.wires[node].dim, 0).flatten(1)  # (units, everything else)
        known = ~values.isnan()
        torch.testing.assert_close(
            flat[known], values[known].float().unsqueeze(1).expand(-1, flat.shape[1]), rtol=1e-5, atol=1e-5
        )
        found += int(known.sum())
    assert found > 0 or share < 1.0
