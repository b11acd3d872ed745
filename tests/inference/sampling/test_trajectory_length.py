"""Tests of the tuning of trajectory lengths."""

from __future__ import annotations

import math

import pytest
import torch

from knowable.inference.sampling import trajectory_length as lengths


def _tuned(first: float, seed: int, *, updates: int = 1500, d: int = 4) -> float:
    """The length found for a standard normal, whose trajectories are known: x cos t + p sin t."""
    generator = torch.Generator().manual_seed(seed)
    state = lengths.begin(first)
    for number in range(updates):
        share = lengths.halton(number + 1)
        time = 2 * share * lengths.length(state, tuning=True)
        x, p = (torch.randn((16, d), generator=generator, dtype=torch.float64) for _ in range(2))
        after, velocity = x * math.cos(time) + p * math.sin(time), p * math.cos(time) - x * math.sin(time)
        one = torch.ones(16, dtype=torch.float64)
        state = lengths.update(state, x, after, velocity, one, share=share, step=0.02)
    return lengths.length(state, tuning=False)


@pytest.mark.parametrize("first", [0.1, 1.0, 8.0])
def test_from_anywhere_the_best_length_for_its_cost_is_found(first, seed):
    # E[C] over t in (0, 2T) is proportional to 1 - sin(4T) / (4T); the best T of that divided by T:
    grid = torch.linspace(0.05, 6, 20_000, dtype=torch.float64)
    best = grid[((1 - (4 * grid).sin() / (4 * grid)) / grid).argmax()].item()
    assert abs(math.log(_tuned(first, seed) / best)) < math.log(1.35)


def test_lengths_stay_between_one_step_and_a_few_hundred():
    still = torch.zeros((3, 2), dtype=torch.float64)
    state = lengths.begin(1e-9)
    state = lengths.update(state, still, still, still, torch.ones(3), share=0.5, step=0.1)
    assert lengths.length(state, tuning=True) == pytest.approx(0.1)
    state = lengths.update(lengths.begin(1e9), still, still, still, torch.ones(3), share=0.5, step=0.1)
    assert lengths.length(state, tuning=True) == pytest.approx(50.0)


def test_shares_are_spread_evenly():
    found = torch.tensor([lengths.halton(number) for number in range(1, 2**8)])
    assert len(found.unique()) == len(found)
    torch.testing.assert_close(found.sort().values, torch.arange(1, 2**8) / 2**8)
