"""Tests of the hashes of training rows, by which held-out data are checked."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.posterior import training_rows
from knowable.core.posterior.training_rows import overlap, refuse_training_rows
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
