from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from knowable.decisions.compress.graph import record_shapes, trace
from knowable.decisions.compress.liveness import NetworkAnalysis, find_living
from knowable.decisions.compress.rewrite import rewrite
from tests.decisions.compress.cases import NETWORKS, make, pruned, random_masks


def _living(net: nn.Module, x: torch.Tensor):
    graph = trace(net.eval())
    assert graph is not None
    record_shapes(graph, x)
    analysis = NetworkAnalysis.of(graph)
    return analysis.dependencies, find_living(analysis)


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_a_unit_is_needed_if_it_moves_with_the_input_and_moves_the_output(share, generator):
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    pruned(net, random_masks(net, share, generator=generator))
    x = torch.randn((5, 6), generator=generator)
    dependencies, living = _living(net, x)
    for node, layer in dependencies.layers()[:-1]:
        cut = int(layer.path) + 1
        hidden = net[:cut](x).detach().requires_grad_()
        moves = torch.autograd.grad(net[cut:](hidden).square().sum(), hidden)[0].abs().sum(0) > 0
        varies = (hidden - hidden[:1]).abs().amax(0) > 0
        assert living.needed[dependencies.units_of[node].units].tolist() == (moves & varies).tolist()


def test_a_tensor_keeps_one_unit_through_which_nothing_flows():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    nn.init.zeros_(net[2].weight)
    dependencies, living = _living(net, torch.randn(2, 3))
    hidden, output = (dependencies.units_of[node].units for node, _ in dependencies.layers())
    assert living.needed[hidden].sum() == 0 and living.kept[hidden].sum() == 1
    assert living.needed[output].all()


# --- constants --------------------------------------------------------------------------------------------------------


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
    analysis = NetworkAnalysis.of(graph)
    with torch.no_grad():
        Watch(graph).run(torch.randn((6, *x.shape[1:]), generator=generator))
    found = 0
    for node, values in analysis.constants.items():
        flat = (
            node.meta["value"].movedim(analysis.dependencies.units_of[node].dim, 0).flatten(1)
        )  # (units, everything else)
        known = ~values.isnan()
        torch.testing.assert_close(
            flat[known], values[known].float().unsqueeze(1).expand(-1, flat.shape[1]), rtol=1e-5, atol=1e-5
        )
        found += int(known.sum())
    assert found > 0 or share < 1.0


# --- carriers ---------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Four constant channels of six; two padded convolutions read them, each behind an activation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.two = (
            nn.Conv2d(1, 6, 3),
            nn.Conv2d(6, 3, 3, padding=1),
            nn.Conv2d(6, 3, 3, padding=1),
        )
        with torch.no_grad():
            self.first.weight[:4] = 0.0
            self.first.bias.copy_(torch.tensor([0.3, 1.0, -0.5, 2.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.one(torch.sigmoid(x)) * self.two(torch.tanh(x))


def _same(net: nn.Module, made: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(made(x), net(x), rtol=1e-5, atol=1e-5)


def test_one_channel_carries_all_with_ratios_of_their_own_for_each_reader():
    net, x = Two().eval(), torch.randn(4, 1, 7, 7)
    made = rewrite(net, x).net
    assert made.first.out_channels == 3
    _same(net, made, x)


def test_channels_read_by_different_layers_are_carried_apart():
    net, x = Two().eval(), torch.randn(4, 1, 7, 7)
    with torch.no_grad():
        net.one.weight[:, :2] = 0.0  # channels 0 and 1 are read by the second alone, 2 and 3 by both
    made = rewrite(net, x).net
    assert made.first.out_channels == 4
    _same(net, made, x)


def test_a_channel_that_varies_elsewhere_is_not_carried():
    class Summed(Two):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.one(torch.sigmoid(y)) * self.two(torch.tanh(y + x[:, :, 1:-1, 1:-1].expand(-1, 6, -1, -1)))

    net, x = Summed().eval(), torch.randn(4, 1, 7, 7)
    made = rewrite(net, x).net
    assert made.first.out_channels == 6
    _same(net, made, x)
