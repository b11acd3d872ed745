"""Tests of bits; the oracle rounds in every number of bits and looks."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.decisions.compress.precision import Grid, bits_needed, check_bits, choose_grids


@pytest.mark.parametrize("spread", [0.9, 0.3, 0.11, 0.02, 0.004, 2e-4])
def test_the_bits_are_the_fewest_that_round_within_half_a_spread(spread):
    mean = torch.linspace(-1.3, 1.3, 100_001, dtype=torch.double)  # so dense that the worst case occurs
    std = torch.full_like(mean, spread)

    def worst(bits: int) -> float:
        levels = 2 ** (bits - 1) - 1
        grid = torch.arange(-levels, levels + 1, dtype=torch.double) * (1.3 / levels)
        nearest = grid[torch.searchsorted((grid[1:] + grid[:-1]) / 2, mean)]
        return (nearest - mean).abs().max().item()

    expected = next(bits for bits in range(2, 17) if worst(bits) <= 0.5 * spread * (1 + 1e-6))
    assert bits_needed(mean, std) == expected


def test_the_spread_is_the_root_of_the_mean_variance():
    mean, std = torch.tensor([1.0, -0.2]), torch.tensor([0.1, 0.7])
    assert bits_needed(mean, std) == bits_needed(mean, torch.full((2,), 0.5))
    assert bits_needed(mean, std) == 3  # steps of 1/3 are smaller than 0.5, steps of 1 are not


def test_weights_known_too_well_stay_as_they_are_and_no_weights_need_least():
    assert bits_needed(torch.ones(3), torch.zeros(3)) is None
    assert bits_needed(torch.ones(3), torch.full((3,), 1e-9)) is None
    assert bits_needed(torch.zeros(0), torch.zeros(0)) == 2
    assert bits_needed(torch.zeros(3), torch.zeros(3)) == 2


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_a_grid_has_so_many_points_and_rounds_to_the_nearest(bits, generator):
    weight = torch.randn(2_000, generator=generator)
    grid = Grid.over(weight, bits)
    codes, rounded = grid.codes(weight), grid.rounded(weight)
    assert codes.abs().max() == 2 ** (bits - 1) - 1
    assert len(rounded.unique()) <= 2**bits - 1
    assert (rounded - weight).abs().max() <= grid.step / 2 * (1 + 1e-5)
    assert torch.equal(grid.rounded(rounded), rounded)
    assert torch.equal(Grid.over(torch.zeros(3), bits).rounded(torch.zeros(3)), torch.zeros(3))


def test_only_weights_that_stay_have_a_say():
    weights, std = {"w": torch.tensor([0.5, 100.0])}, {"w": torch.tensor([0.5, 1e-6])}
    masks = {"w": torch.tensor([True, False])}
    assert choose_grids(weights, masks, std, None) == {}
    assert choose_grids(weights, masks, std, "posterior") == {"w": Grid(2, 0.5)}
    assert choose_grids(weights, masks, std, 4)["w"].step == pytest.approx(0.5 / 7)


@pytest.mark.parametrize("bits", ["eight", 1, 17, 2.5, True])
def test_wrong_bits_are_refused(bits):
    with pytest.raises(kn.KnowableError, match="bits must be"):
        check_bits(bits)
