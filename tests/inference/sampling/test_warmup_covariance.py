"""The shape of a density, learned from where chains have been."""

from __future__ import annotations

import torch

from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.moves import RandomWalk
from knowable.inference.sampling.warmup_covariance import (
    apply,
    apply_transposed,
    estimate,
    observe,
    open_window,
    windows,
)


def test_the_shape_of_a_window_is_its_covariance_within_chains_or_in_all(generator):
    start = torch.randn((6, 3), generator=generator, dtype=torch.float64)
    moves = RandomWalk(groups=2)
    state = moves.init(DensityTarget(lambda p: -p["x"].square().sum(), Layout.of({"x": start[0]})), start)
    history = 5 + start + torch.randn((400, 6, 3), generator=generator, dtype=torch.float64)
    open_window(state)
    for position in history:
        state["position"] = position
        observe(state)
    for within in (True, False):
        factor = estimate(state, within=within)
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
    state = {"position": torch.zeros(4, 2), "factor": torch.full((1, 2), 3.0)}
    open_window(state)
    for _ in range(20):
        state["position"] = torch.stack([torch.randn(4), torch.zeros(4)], dim=1)
        observe(state)
    found = estimate(state)
    assert found is not None
    assert abs(found[0, 1].item() - 0.3) < 1e-6


def test_too_few_positions_say_nothing():
    state = {"position": torch.zeros(4, 2), "factor": torch.ones(1, 2)}
    open_window(state)
    for _ in range(4):
        observe(state)
    assert estimate(state) is None


def test_a_shape_is_applied_to_the_chains_of_its_own_group():
    vectors = torch.randn(6, 3, dtype=torch.float64)
    dense = torch.randn(2, 3, 3, dtype=torch.float64).tril()
    for each, chain in ((0, 1), (1, 4)):
        torch.testing.assert_close(apply(dense, vectors)[chain], dense[each] @ vectors[chain])
        torch.testing.assert_close(apply_transposed(dense, vectors)[chain], dense[each].T @ vectors[chain])
        diagonal = dense.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(apply(diagonal, vectors)[chain], diagonal[each] * vectors[chain])
