from __future__ import annotations

import torch
from benchmarks.networks import NETWORKS

# counted by hand: weights and biases of each layer, and scale and shift of each batch normalisation


def test_networks_and_data_repeat_without_touching_the_global_generator():
    before = torch.random.get_rng_state()
    first, second = NETWORKS["mlp"].make(), NETWORKS["mlp"].make()
    data, again = NETWORKS["mlp"].data(3), NETWORKS["mlp"].data(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(data[0], again[0]) and torch.equal(data[1], again[1])
