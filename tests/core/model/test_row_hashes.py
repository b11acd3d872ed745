"""Tests of the hashes of rows."""

from __future__ import annotations

import struct

import torch

from knowable.core.model import row_hashes as module
from knowable.core.model.row_hashes import row_hashes
from knowable.core.network.inputs import Inputs


def test_hashes_tell_rows_apart_and_are_the_same_in_parts(generator, monkeypatch):
    x = torch.randint(0, 50, (3000, 4), generator=generator).float() * torch.tensor([1.0, 2**-20, 2.0**20, 1.0])
    y = torch.zeros(3000)
    hashes = row_hashes(x, y)
    assert len(hashes.unique()) == len(x.unique(dim=0))
    monkeypatch.setattr(module, "_VALUES_AT_ONCE", 1000)
    assert torch.equal(row_hashes(x, y), hashes)
    assert torch.equal(row_hashes(Inputs((x[:, :2], x[:, 2:])), y), hashes)
    assert torch.equal(row_hashes(-x * 0.0, y), row_hashes(x * 0.0, y))


def test_hashes_are_those_of_earlier_versions():
    """Artifacts hold them: they must never change."""
    x, y = torch.tensor([[0.0, 1.5], [-2.0, 3.0]]), torch.tensor([0, 1])
    assert row_hashes(x, y).tolist() == [6701426157849322620, -6314266859652616544]
    assert row_hashes(x, y).tolist() == [_slow_hash([0.0, 1.5, 0]), _slow_hash([-2.0, 3.0, 1])]


def _slow_hash(row: list[float | int]) -> int:
    bits = [struct.unpack("<q", struct.pack("<d", each))[0] if isinstance(each, float) else each for each in row]
    return _signed(sum(_slow_mix(value) * _slow_mix(place) for place, value in enumerate(bits)))


def _slow_mix(bits: int) -> int:
    bits = _signed((bits + 1) * -7046029254386353131)
    bits = _signed((bits ^ (bits >> 30)) * -4658895280553007687)
    bits = _signed((bits ^ (bits >> 27)) * -7723592293110705685)
    return bits ^ (bits >> 31)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63
