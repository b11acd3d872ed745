"""Moves at temperatures of their own leave the tempered density as it is."""

from __future__ import annotations

import math

import pytest
import torch

from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.moves import Hamiltonian, RandomWalk


@pytest.mark.parametrize("moves", [RandomWalk(groups=2, steps=5), Hamiltonian(groups=2, steps=3)], ids=repr)
def test_a_transition_leaves_the_tempered_density_as_it_is(moves, generator):
    # 20,000 chains from N(0, T) at T = 1 and T = 4, moved with the wrong shape and long steps: still N(0, T)
    each = 20_000
    temperature = torch.tensor([1.0, 4.0], dtype=torch.float64).repeat_interleave(each)
    start = torch.randn((2 * each, 2), generator=generator, dtype=torch.float64) * temperature.sqrt().unsqueeze(1)
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": start[0]}))
    state = moves.init(target, start)
    state["factor"] = torch.tensor([[[1.2, 0.0], [0.8, 0.5]]] * 2, dtype=torch.float64)
    info = moves.transition(target, state, temperature, generator=generator)
    assert (state["position"] != start).any(1).double().mean() > 0.5
    assert torch.allclose(state["value"], -0.5 * state["position"].square().sum(1))
    assert torch.allclose(state.get("gradient", -state["position"]), -state["position"])
    assert 0.1 < info["acceptance"].mean() < 0.99
    for group, t in enumerate((1.0, 4.0)):
        x = state["position"][group * each : (group + 1) * each]
        assert (x.mean(0).abs() < 4 * math.sqrt(t / each)).all()
        assert ((x.T @ x / each - t * torch.eye(2)).abs() < 4 * t * math.sqrt(2 / each)).all()
