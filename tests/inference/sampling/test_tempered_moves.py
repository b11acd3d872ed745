"""Moves at temperatures of their own leave the tempered density as it is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.metric import Window
from knowable.inference.sampling.tempered_moves import (
    Hamiltonian,
    RandomWalk,
    estimate,
    identity_factor,
    pull,
    spread,
    windows,
)


@pytest.mark.parametrize("moves", [RandomWalk(groups=2, steps=5), Hamiltonian(groups=2, steps=3)], ids=repr)
def test_a_transition_leaves_the_tempered_density_as_it_is(moves, generator):
    # 20,000 chains from N(0, T) at T = 1 and T = 4, moved with the wrong shape and long steps: still N(0, T)
    each = 20_000
    temperature = torch.tensor([1.0, 4.0], dtype=torch.float64).repeat_interleave(each)
    start = torch.randn((2 * each, 2), generator=generator, dtype=torch.float64) * temperature.sqrt().unsqueeze(1)
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": start[0]}))
    state = moves.init(target, start)
    state = replace(state, factor=torch.tensor([[[1.2, 0.0], [0.8, 0.5]]] * 2, dtype=torch.float64))
    state, info = moves.transition(target, state, temperature, generator=generator)
    assert (state.position != start).any(1).double().mean() > 0.5
    assert torch.allclose(state.value, -0.5 * state.position.square().sum(1))
    assert torch.allclose(-state.position if state.gradient is None else state.gradient, -state.position)
    assert 0.1 < info.acceptance.mean() < 0.99
    for group, t in enumerate((1.0, 4.0)):
        x = state.position[group * each : (group + 1) * each]
        assert (x.mean(0).abs() < 4 * math.sqrt(t / each)).all()
        assert ((x.T @ x / each - t * torch.eye(2)).abs() < 4 * t * math.sqrt(2 / each)).all()


# --- the covariance ---------------------------------------------------------------------------------------------------


def test_the_factor_of_a_window_is_its_covariance_within_chains_or_in_all(generator):
    start = torch.randn((6, 3), generator=generator, dtype=torch.float64)
    history = 5 + start + torch.randn((400, 6, 3), generator=generator, dtype=torch.float64)
    seen = Window.open(start, dense=True, groups=2)
    for position in history:
        seen = seen.observe(position)
    for within in (True, False):
        factor = estimate(seen, identity_factor(2, start, dense=True), within=within)
        assert factor is not None
        for group in range(2):
            mine = history[:, 3 * group : 3 * group + 3]  # (400, 3 chains, 3)
            centred = mine - mine.mean(0)
            expected = torch.einsum("ncd,nce->de", centred, centred) / (3 * 399)
            if not within:
                expected = expected + mine.mean(0).T.cov()
            shrunk = expected * (3 * 399 / (3 * 399 + 3))
            shrunk.diagonal().copy_(expected.diagonal())
            assert torch.allclose(factor[group] @ factor[group].T, shrunk, rtol=1e-9)


def test_windows_grow_and_leave_the_last_tenth_alone():
    assert windows(500)[-1] == 450
    widths = torch.tensor([0, *windows(500)]).diff()
    assert (widths.diff() > 0).all()
    assert windows(5) == []


def test_a_direction_that_did_not_move_is_taken_to_be_a_tenth_as_wide():
    seen = Window.open(torch.zeros(4, 2), dense=False)
    for _ in range(20):
        seen = seen.observe(torch.stack([torch.randn(4), torch.zeros(4)], dim=1))
    found = estimate(seen, torch.full((1, 2), 3.0))
    assert found is not None
    assert abs(found[0, 1].item() - 0.3) < 1e-6


def test_too_few_positions_say_nothing():
    seen = Window.open(torch.zeros(4, 2), dense=False)
    for _ in range(4):
        seen = seen.observe(torch.zeros(4, 2))
    assert estimate(seen, torch.ones(1, 2)) is None


def test_a_factor_is_applied_to_the_chains_of_its_own_group():
    vectors = torch.randn(6, 3, dtype=torch.float64)
    dense = torch.randn(2, 3, 3, dtype=torch.float64).tril()
    for each, chain in ((0, 1), (1, 4)):
        torch.testing.assert_close(spread(dense, vectors)[chain], dense[each] @ vectors[chain])
        torch.testing.assert_close(pull(dense, vectors)[chain], dense[each].T @ vectors[chain])
        diagonal = dense.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(spread(diagonal, vectors)[chain], diagonal[each] * vectors[chain])
