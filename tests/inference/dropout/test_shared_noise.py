from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.network.network import Network
from knowable.core.support.randomness import own_randomness
from knowable.inference.dropout.shared_noise import SharedNoise, plain_attention, random_axes, turn_on_noise
from tests.inference.dropout.networks import Attention, Functional, Residual, images, perceptron

NETS = {
    "residual": (Residual(), (3,)),
    "functional": (Functional(), (3,)),
    "attention": (Attention(), (5, 4)),
    "attention, time first": (Attention(batch_first=False), (5, 4)),
    "channels": (images(), (1, 8, 8)),
    "alpha": (nn.Sequential(nn.Linear(3, 4), nn.AlphaDropout(0.3), nn.Linear(4, 1)), (3,)),
    "transformer layer": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 4)),
}  # fmt: skip


def noisy(net: nn.Module) -> Network:
    network = Network(net)
    turn_on_noise(network)
    return network


def run(network: Network, x: Tensor, axes: list, seed: int = 0) -> Tensor:
    with torch.no_grad(), own_randomness(seed), plain_attention(), SharedNoise(axes):
        return network(network.params(), x)


@pytest.mark.parametrize("name", NETS)
def test_a_row_has_the_same_output_whatever_rows_come_with_it(name, generator):
    net, shape = NETS[name]
    network, x = noisy(net), torch.randn((8, *shape), generator=generator)
    axes = random_axes(network, network.params(), x, {})
    assert axes and None not in axes
    whole = run(network, x, axes)
    for rows in (slice(0, 1), slice(2, 4), slice(1, 8)):
        assert torch.allclose(run(network, x[rows], axes), whole[rows], atol=1e-6)
    assert not torch.allclose(run(network, x, axes, seed=1), whole)


@pytest.mark.parametrize("rows", [2, 4, 5])
def test_sequences_as_long_as_the_batch_are_not_mistaken_for_it(rows, generator):
    for net in (Attention(), Attention(batch_first=False)):
        network, x = noisy(net), torch.randn((rows, rows, 4), generator=generator)
        axes = random_axes(network, network.params(), x, {})
        whole = run(network, x, axes)
        assert torch.allclose(run(network, x[:1], axes), whole[:1], atol=1e-6)


def test_rates_are_those_of_the_layers(seed):
    network = noisy(nn.Sequential(nn.Dropout(0.3)))
    x = torch.ones(2, 20_000)
    found = run(network, x, random_axes(network, {}, x, {}), seed)
    kept = (found != 0).double().mean().item()
    assert abs(kept - 0.7) < 5 * math.sqrt(0.21 / 20_000)
    assert torch.equal(found[0], found[1]) and torch.allclose(found[found != 0], torch.tensor(1 / 0.7))


@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like, lambda x: torch.empty_like(x).exponential_()])
def test_other_random_numbers_are_shared_too(draw, generator):
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + draw(x)

    network, x = noisy(Noise()), torch.zeros(4, 3)
    found = run(network, x, random_axes(network, {}, x, {}))
    assert (found == found[:1]).all() and (found[0] != found[0, :1]).any()


def test_the_fused_dropout_of_other_devices_is_shared(seed):
    class Fused(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.native_dropout(x, 0.25, True)[0]

    network, x = noisy(Fused()), torch.ones(3, 20_000)
    found = run(network, x, random_axes(network, {}, x, {}), seed)
    assert (found == found[:1]).all()
    assert abs((found[0] != 0).double().mean() - 0.75) < 5 * math.sqrt(0.1875 / 20_000)
    assert torch.allclose(found[found != 0], torch.tensor(1 / 0.75))


def test_nothing_random_is_nothing_to_share():
    for net, shape in ((perceptron(None), (3,)), (nn.Dropout(0.0), (3,)), (Attention(0.0), (5, 4))):
        network = noisy(net)
        assert random_axes(network, network.params(), torch.randn(4, *shape), {}) == []


def test_noise_is_on_and_statistics_stay(generator):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    network, x = noisy(net), torch.randn((6, 3), generator=generator)
    buffers = network.buffers()
    before = {name: value.clone() for name, value in buffers.items()}
    with own_randomness(0):
        output = network(network.params(), x, buffers=buffers)
    assert all(torch.equal(value, before[name]) for name, value in buffers.items())
    assert (output == 0).any()
    kept = output != 0
    assert torch.allclose(output[kept], 2 * net.eval()(x)[kept], atol=1e-6)


def test_operations_that_were_not_foreseen_draw_for_each_row():
    x = torch.ones(4, 1000)
    with own_randomness(0), SharedNoise([]):
        found = F.dropout(x, 0.5)
    assert not torch.equal(found[0], found[1])
