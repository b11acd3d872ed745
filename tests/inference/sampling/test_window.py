"""Sums over a window of the warm-up, against covariances by the definition."""

from __future__ import annotations

import pytest
import torch

from knowable.inference.sampling import window

GROUPS, CHAINS, D = 2, 3, 2


@pytest.mark.parametrize("dense", [True, False])
def test_covariances_within_and_between_chains_are_those_of_each_group(dense, generator):
    history = 1e6 + torch.randn((50, GROUPS * CHAINS, D), generator=generator, dtype=torch.float64)
    history = history + 10 * torch.randn((GROUPS * CHAINS, D), generator=generator, dtype=torch.float64)
    state: dict[str, torch.Tensor] = {}
    window.open_window(state, {"x": history[0]}, dense=dense, groups=GROUPS)
    for each in history:
        window.observe(state, {"x": each})
    assert window.enough(state) and window.freedom(state, "x") == CHAINS * 49
    for group in range(GROUPS):
        mine = history[:, group * CHAINS : (group + 1) * CHAINS]
        within = torch.stack([mine[:, chain].T.cov() for chain in range(CHAINS)]).mean(0)
        between = mine.mean(0).T.cov()
        for found, expected in ((window.within(state, "x"), within), (window.between(state, "x"), between)):
            torch.testing.assert_close(found[group], expected if dense else expected.diagonal(), rtol=1e-6, atol=1e-8)


def test_several_quantities_are_watched_side_by_side():
    state: dict[str, torch.Tensor] = {}
    x, g = torch.zeros(2, 3), torch.zeros(2, 3)
    window.open_window(state, {"x": x, "g": g}, dense=False)
    for i in range(6):
        window.observe(state, {"x": x + i, "g": g + 2 * i})
    torch.testing.assert_close(4 * window.within(state, "x"), window.within(state, "g"))
    assert state["window.count"] == 6


def test_one_chain_has_no_spread_between_chains():
    state: dict[str, torch.Tensor] = {}
    window.open_window(state, {"x": torch.zeros(1, 2)}, dense=False)
    for _ in range(6):
        window.observe(state, {"x": torch.randn(1, 2)})
    assert torch.equal(window.between(state, "x"), torch.zeros(1, 2, dtype=torch.float64))
