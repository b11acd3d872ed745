"""Tests of the code for sparse tensors: what comes back, and how long it is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.decisions.compress.precision import Grid
from knowable.decisions.compress.sparse_code import Code, decode, encode, pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("shape", [(37, 23), (5, 4, 3, 3), (1, 1)])
def test_every_bit_comes_back(shape, share, dtype, generator):
    there = torch.rand(shape, generator=generator) < share
    weight = torch.where(there, torch.randn(shape, generator=generator), 0.0).to(dtype)
    code, stream = encode(weight)
    again = decode(Code.from_json(code.to_json()), stream)
    assert again.dtype == dtype and torch.equal(again, weight)
    assert len(stream) == -(-code.place_bits // 8) + -(-code.count * code.value_bits // 8)


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_weights_on_a_grid_come_back_and_take_so_many_bits(share, bits, generator):
    there = torch.rand((40, 30), generator=generator) < share
    weight = torch.where(there, torch.randn((40, 30), generator=generator), 0.0)
    grid = Grid.over(weight, bits)
    code, stream = encode(grid.rounded(weight), grid)
    assert code.bits == bits
    assert torch.equal(decode(Code.from_json(code.to_json()), stream), grid.rounded(weight))


def test_a_grid_the_weights_do_not_lie_on_is_not_used():
    weight = torch.tensor([[0.1, 0.0, 0.25]])
    code, stream = encode(weight, Grid(4, 0.05001))
    assert code.bits is None and torch.equal(decode(code, stream), weight)


@pytest.mark.parametrize(("share", "layout"), [(1.0, "dense"), (0.5, "bitmap"), (0.01, "gaps")])
def test_the_shortest_layout_is_taken_and_beats_the_others_by_hand(share, layout, generator):
    there = torch.rand((100, 100), generator=generator) < share
    code, _ = encode(there.float())
    assert code.layout == layout
    count = int(there.sum())
    positions = there.flatten().nonzero().flatten().tolist()
    gaps = [b - a - 1 for a, b in zip([-1, *positions[:-1]], positions, strict=True)]
    by_gaps = [sum((gap // (2**k - 1)) + 1 for gap in gaps) * k for k in range(1, 17)]
    assert code.total_bits == min(32 * 10_000, 10_000 + 32 * count, min(by_gaps) + 32 * count)


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
        Code.from_json({**code.to_json(), **change})


def test_streams_that_do_not_fit_are_damage():
    code, stream = encode(torch.eye(50))
    with pytest.raises(kn.DamagedArtifact, match="bytes where"):
        decode(code, stream[:-1])
    with pytest.raises(kn.DamagedArtifact, match="places that do not fit"):
        decode(dataclasses.replace(code, shape=(7, 7)), stream)
