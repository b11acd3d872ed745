from __future__ import annotations

import pytest
import torch
from benchmarks.networks import NETWORKS, Layers, plain_convolution
from torch import nn

# counted by hand: weights and biases of each layer, and scale and shift of each batch normalisation
SIZES = {
    "mlp": 784 * 400 + 400 + 400 * 400 + 400 + 400 * 10 + 10,
    "lenet": 25 * 20 + 20 + 25 * 20 * 50 + 50 + 800 * 500 + 500 + 500 * 10 + 10,
    "resnet": (27 * 16 + 32)
    + (2 * 144 * 16 + 64)
    + (144 * 32 + 288 * 32 + 16 * 32 + 128)
    + (288 * 64 + 576 * 64 + 32 * 64 + 256)
    + (64 * 10 + 10),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_has_the_size_of_its_description(name):
    net = NETWORKS[name].make()
    assert sum(parameter.numel() for parameter in net.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", NETWORKS)
def test_network_maps_a_batch_to_logits(name):
    network = NETWORKS[name]
    x, y = network.data(4)
    assert x.shape == (4, *network.input_shape)
    assert network.make()(x).shape == (4, 10)
    assert y.dtype == torch.long and int(y.min()) >= 0 and int(y.max()) <= 9


def test_networks_and_data_repeat_without_touching_the_global_generator():
    before = torch.random.get_rng_state()
    first, second = NETWORKS["mlp"].make(), NETWORKS["mlp"].make()
    data, again = NETWORKS["mlp"].data(3), NETWORKS["mlp"].data(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(data[0], again[0]) and torch.equal(data[1], again[1])


@pytest.mark.parametrize(("name", "linear", "convolutions"), [("mlp", 3, 0), ("lenet", 2, 2), ("resnet", 1, 9)])
def test_every_weight_layer_comes_from_the_given_layers(name, linear, convolutions):
    made: list[str] = []

    def counted_linear(inputs: int, outputs: int) -> nn.Module:
        made.append("linear")
        return nn.Linear(inputs, outputs)

    def counted_convolution(inputs: int, outputs: int, kernel: int, **options: int | bool) -> nn.Module:
        made.append("convolution")
        return plain_convolution(inputs, outputs, kernel, **options)  # type: ignore[arg-type]

    NETWORKS[name].make(Layers(counted_linear, counted_convolution))
    assert (made.count("linear"), made.count("convolution")) == (linear, convolutions)
