"""Tests of needs; the gradient of the output with respect to each unit is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from knowable.decisions.compress.graph import record_shapes, trace
from knowable.decisions.compress.liveness import find_constants, find_living
from knowable.decisions.compress.surgery import LayerWeights
from knowable.decisions.compress.wiring import Wiring
from tests.decisions.compress.cases import pruned, random_masks


def _living(net: nn.Module, x: torch.Tensor):
    graph = trace(net.eval())
    assert graph is not None
    record_shapes(graph, x)
    wiring = Wiring.of(graph)
    weights = {layer.path: LayerWeights.of(graph.get_submodule(layer.path)) for _, layer in wiring.layers()}
    return wiring, find_living(wiring, weights, find_constants(wiring, weights))


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_unit_is_needed_if_it_moves_with_the_input_and_moves_the_output(share, generator):
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    pruned(net, random_masks(net, share, generator=generator))
    x = torch.randn((5, 6), generator=generator)
    wiring, living = _living(net, x)
    for node, layer in wiring.layers()[:-1]:
        cut = int(layer.path) + 1
        hidden = net[:cut](x).detach().requires_grad_()
        moves = torch.autograd.grad(net[cut:](hidden).square().sum(), hidden)[0].abs().sum(0) > 0
        varies = (hidden - hidden[:1]).abs().amax(0) > 0
        assert living.needed[wiring.wires[node].units].tolist() == (moves & varies).tolist()


def test_a_tensor_keeps_one_unit_through_which_nothing_flows():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.init.zeros_(net[2].weight)
    wiring, living = _living(net, torch.randn(2, 3))
    hidden, output = (wiring.wires[node].units for node, _ in wiring.layers())
    assert living.needed[hidden].sum() == 0 and living.kept[hidden].sum() == 1
    assert living.needed[output].all()
