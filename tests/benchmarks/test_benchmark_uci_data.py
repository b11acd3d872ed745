from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.uci_data import Split, cut, load, mean_and_error, scaler_of, validation_parts


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with a small data set of two splits."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((30, 2))
    mask = np.zeros((2, 30), dtype=bool)
    mask[0, :6], mask[1, 6:12] = True, True
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "yacht.npz", x=x, y=1000 + 50 * x[:, 0], test_mask=mask)
    monkeypatch.setenv("KNOWABLE_DATA", str(tmp_path))


def numbered(rows: int) -> Split:
    """A split whose inputs are the numbers of its rows."""
    x = np.arange(float(rows))[:, None]
    return cut(x, 10 * x[:, 0], np.arange(rows) >= rows - 5)


@pytest.mark.usefixtures("data")
def test_split_holds_out_the_rows_of_its_mask():
    first, second = load("yacht", 0), load("yacht", 1)
    assert first.x.shape == (24, 2) and first.test_y.shape == (6,)
    assert not torch.equal(first.test_x, second.test_x)
    whole = torch.cat([first.test_y, first.y])
    torch.testing.assert_close(second.test_y, whole[6:12])


def test_validation_predicts_each_training_row_once_and_uses_no_test_row(seed):
    split = numbered(25)
    parts = validation_parts(split, folds=3, seed=seed)
    assert sorted(len(part.test_x) for part in parts) == [6, 7, 7]
    for part in parts:
        used = torch.cat([part.x, part.test_x]).flatten()
        assert used.sort().values.tolist() == list(range(20))
        assert torch.equal(part.test_y, 10 * part.test_x.flatten()) and torch.equal(part.y, 10 * part.x.flatten())
    assert torch.cat([part.test_x for part in parts]).flatten().sort().values.tolist() == list(range(20))


def test_scaler_knows_the_training_rows_only():
    split = numbered(25)
    scaler = scaler_of(split)
    scaled = scaler.scale_x(split.x)
    assert scaler.x_mean.item() == pytest.approx(9.5) and scaler.y_mean == pytest.approx(95.0)
    assert scaled.mean().item() == pytest.approx(0, abs=1e-6)
    assert scaled.std(correction=0).item() == pytest.approx(1, rel=1e-6)


def test_mean_and_error_are_those_of_the_splits():
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    mean, error = mean_and_error([4.0])
    assert mean == 4.0 and math.isnan(error)
