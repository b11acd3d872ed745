from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.decisions.compress.sparse_code import (
    QuantisationGrid,
    SparseCode,
    bits_needed,
    check_bits,
    choose_grids,
    decode,
    encode,
    pack,
    unpack,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(37, 23), (5, 4, 3, 3), (1, 1)])
def test_every_bit_comes_back(shape, share, dtype, generator):
    there = torch.rand(shape, generator=generator) < share
    weight = torch.where(there, torch.randn(shape, generator=generator), 0.0).to(dtype)
    code, stream = encode(weight)
    again = decode(SparseCode.from_json(code.to_json()), stream)
    assert again.dtype == dtype and torch.equal(again, weight)
    assert len(stream) == -(-code.place_bits // 8) + -(-code.count * code.value_bits // 8)


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_weights_on_a_grid_come_back_and_take_so_many_bits(share, bits, generator):
    there = torch.rand((40, 30), generator=generator) < share
    weight = torch.where(there, torch.randn((40, 30), generator=generator), 0.0)
    grid = QuantisationGrid.over(weight, bits)
    code, stream = encode(grid.rounded(weight), grid)
    assert code.bits == bits
    assert torch.equal(decode(SparseCode.from_json(code.to_json()), stream), grid.rounded(weight))


def test_a_grid_the_weights_do_not_lie_on_is_not_used():
    weight = torch.tensor([[0.1, 0.0, 0.25]])
    code, stream = encode(weight, QuantisationGrid(4, 0.05001))
    assert code.bits is None and torch.equal(decode(code, stream), weight)


@pytest.mark.parametrize(("share", "layout"), [(1.0, "dense"), (0.5, "gaps"), (0.01, "gaps")])
def test_the_shortest_layout_is_taken_and_beats_the_others_by_hand(share, layout, generator):
    there = torch.rand((100, 100), generator=generator) < share
    code, _ = encode(there.float())
    assert code.layout == layout
    assert code.total_bits <= 10_000 + 32 * int(there.sum())  # never longer than a map of bits
    count = int(there.sum())
    positions = there.flatten().nonzero().flatten().tolist()
    gaps = [b - a - 1 for a, b in zip([-1, *positions[:-1]], positions, strict=True)]
    by_gaps = [sum((gap // (2**k - 1)) + 1 for gap in gaps) * k for k in range(1, 17)]
    assert code.total_bits == min(32 * 10_000, min(by_gaps) + 32 * count)


def test_a_sparse_tensor_is_much_smaller_than_a_dense_one(generator):
    there = torch.rand((300, 784), generator=generator) < 0.02
    weight = torch.where(there, torch.randn((300, 784), generator=generator), 0.0)
    _, stream = encode(weight)
    # 32 bits for each value, and 7 or 8 for a place: the entropy of a place is 7.07 bits
    assert 32 + 7 < 8 * len(stream) / int(there.sum()) < 32 + 8.5


@pytest.mark.parametrize("bits", [1, 3, 7, 8, 13, 16])
def test_packed_numbers_come_back_in_the_room_they_need(bits):
    numbers = np.random.default_rng(0).integers(0, 2**bits, 77)
    packed = pack(numbers, bits)
    assert len(packed) == -(-77 * bits // 8)
    assert np.array_equal(unpack(packed.numpy(), bits, 77), numbers)


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "pickle"},
        {"dtype": "complex64"},
        {"count": 10**9},
        {"count": -1},
        {"gap_bits": 60},
        {"bits": 40},
        {"shape": ["a"]},
        {"extra": 1},
    ],
)
def test_a_code_that_cannot_be_is_damage(change):
    code, _ = encode(torch.eye(50))
    with pytest.raises(kn.DamagedArtifact, match="cannot be read"):
        SparseCode.from_json({**code.to_json(), **change})


def test_streams_that_do_not_fit_are_damage():
    code, stream = encode(torch.eye(50))
    with pytest.raises(kn.DamagedArtifact, match="bytes where"):
        decode(code, stream[:-1])
    with pytest.raises(kn.DamagedArtifact, match="places that do not fit"):
        decode(dataclasses.replace(code, shape=(7, 7)), stream)


# --- precision --------------------------------------------------------------------------------------------------------


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
    grid = QuantisationGrid.over(weight, bits)
    codes, rounded = grid.codes(weight), grid.rounded(weight)
    assert codes.abs().max() == 2 ** (bits - 1) - 1
    assert len(rounded.unique()) <= 2**bits - 1
    # the result is rounded once more, to float32: half of 2^-23 of the largest
    assert (rounded - weight).abs().max() <= grid.step / 2 + weight.abs().max() * 2**-23
    assert torch.equal(grid.rounded(rounded), rounded)
    assert torch.equal(QuantisationGrid.over(torch.zeros(3), bits).rounded(torch.zeros(3)), torch.zeros(3))


def test_only_weights_that_stay_have_a_say():
    weights, std = {"w": torch.tensor([0.5, 100.0])}, {"w": torch.tensor([0.5, 1e-6])}
    masks = {"w": torch.tensor([True, False])}
    assert choose_grids(weights, masks, std, None) == {}
    assert choose_grids(weights, masks, std, "posterior") == {"w": QuantisationGrid(2, 0.5)}
    assert choose_grids(weights, masks, std, 4)["w"].step == pytest.approx(0.5 / 7)


@pytest.mark.parametrize("bits", ["eight", 1, 17, 2.5, True])
def test_wrong_bits_are_refused(bits):
    with pytest.raises(kn.KnowableError, match="bits must be"):
        check_bits(bits)
