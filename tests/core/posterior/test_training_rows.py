"""Tests of the hashes of training rows, by which held-out data are checked."""

from __future__ import annotations

import struct

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.network.inputs import Inputs
from knowable.core.posterior import training_rows
from knowable.core.posterior.training_rows import overlap, refuse_training_rows, row_hashes
from tests.core.cases import linear_data, linear_model


def _fit(data, model=None):
    return kn.MaximumLikelihood(epochs=1).fit(model or linear_model(), data)


def test_overlap_counts_the_rows_in_common(generator, tmp_path):
    x, y = linear_data(50, generator=generator)
    posterior = _fit((x[:30], y[:30]))
    assert overlap(posterior, (x[30:], y[30:])) == 0
    assert overlap(posterior, (x[20:], y[20:])) == 10
    assert overlap(posterior, (x[:30].float().double(), y[:30])) == 0  # other numbers, and so other rows
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert overlap(loaded, (x[20:].numpy(), y[20:].squeeze(1).numpy())) == 10


def test_an_input_measured_twice_is_two_rows(generator):
    x, y = linear_data(30, generator=generator)
    assert overlap(_fit((x, y)), (x, y + 0.1)) == 0


def test_rows_of_a_loader_are_known(generator):
    x, y = linear_data(40, generator=generator)
    posterior = _fit(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
    assert overlap(posterior, TensorDataset(x[:15], y[:15])) == 15


def test_without_a_fit_nothing_is_known(generator):
    posterior = _fit(linear_data(generator=generator))
    posterior.training_rows = None
    assert overlap(posterior, linear_data(generator=generator)) is None
    refuse_training_rows(posterior, linear_data(generator=generator))


@pytest.mark.parametrize("rows", [1, 3, 5, 20])
def test_training_rows_are_refused(rows, generator):
    x, y = linear_data(20, generator=generator)
    posterior = _fit((x, y))
    with pytest.raises(kn.errors.InvalidData, match=f"{rows} of the {rows} rows of held_out are rows"):
        refuse_training_rows(posterior, (x[:rows], y[:rows]))


def test_discrete_rows_that_are_equal_by_chance_are_not_refused(seed):
    """Four possible inputs and two labels, or several hundred: new rows equal old ones all the time."""
    for values in (2, 20):
        refused = 0
        for part in range(20):
            generator = torch.Generator().manual_seed(1000 * seed + part)
            x = torch.randint(values, (400, 2), generator=generator).double()
            y = torch.randint(2, (400, 1), generator=generator).double()
            posterior = _fit((x[:200], y[:200]))
            try:
                refuse_training_rows(posterior, (x[200:], y[200:]))
            except kn.errors.InvalidData:
                refused += 1
        assert refused == 0


def test_of_many_rows_a_sample_is_kept(generator, monkeypatch):
    monkeypatch.setattr(training_rows, "_MOST_ROWS", 100)
    x, y = linear_data(400, generator=generator)
    posterior = _fit((x, y))
    assert len(posterior.training_rows.hashes) == 100
    assert overlap(posterior, (x, y)) == 100
    with pytest.raises(kn.errors.InvalidData, match="At least 100 of the 400"):
        refuse_training_rows(posterior, (x, y))


def test_hashes_tell_rows_apart_and_are_the_same_in_parts(generator, monkeypatch):
    x = torch.randint(0, 50, (3000, 4), generator=generator).float() * torch.tensor([1.0, 2**-20, 2.0**20, 1.0])
    y = torch.zeros(3000)
    hashes = row_hashes(x, y)
    assert len(hashes.unique()) == len(x.unique(dim=0))
    monkeypatch.setattr(training_rows, "_VALUES_AT_ONCE", 1000)
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
