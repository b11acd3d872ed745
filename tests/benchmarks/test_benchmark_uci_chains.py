from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.study import Rows
from benchmarks.uci_chains import (
    PUBLISHED,
    Recipe,
    cut,
    evaluate,
    load,
    mean_and_error,
    network,
    run,
    summarise,
    to_markdown,
)

from benchmarks import uci_chains

TINY = Recipe(hidden=(3,), chains=2, warmup=2, draws=4, start="prior")


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


@pytest.mark.usefixtures("data")
def test_split_holds_out_the_rows_of_its_mask():
    first, second = load("yacht", 0), load("yacht", 1)
    assert first.x.shape == (24, 2) and first.test_y.shape == (6,)
    assert torch.equal(first.test_x, torch.cat([first.test_x])) and not torch.equal(first.test_x, second.test_x)
    whole = torch.cat([first.test_y, first.y])
    torch.testing.assert_close(second.test_y, whole[6:12])


def test_missing_folder_is_named(monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="KNOWABLE_DATA"):
        load("yacht", 0)


def test_log_likelihood_is_in_the_units_of_the_target():
    # the same data in units 1,024 times smaller: densities fall by that factor, errors grow by it. A power of two
    # scales without rounding, so that both fits see the same standardised numbers; what is left is float32's 1e-7
    generator = np.random.default_rng(1)
    x = generator.standard_normal((24, 2))
    y, test = x.sum(1), np.arange(24) % 4 == 0
    one, many = (evaluate(cut(x, scale * y, test), TINY, seed=0) for scale in (1.0, 1024.0))
    assert many["log_likelihood"] == pytest.approx(one["log_likelihood"] - math.log(1024), abs=1e-4)
    assert many["rmse"] == pytest.approx(1024 * one["rmse"], rel=1e-4)


def test_network_gives_mean_and_log_noise():
    net = network(5, Recipe(hidden=(7, 6), activation="relu"))
    assert net(torch.zeros(3, 5)).shape == (3, 2)
    assert [type(layer).__name__ for layer in net] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_mean_and_error_are_those_of_the_splits():
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    mean, error = mean_and_error([4.0])
    assert mean == 4.0 and math.isnan(error)


def test_failed_splits_are_counted_out_and_named():
    row = {"log_likelihood": -1.0, "rmse": 2.0, "rhat": 1.0, "gradients": 5.0, "seconds": 3.0, "error": None}
    found = summarise([row, {**row, "log_likelihood": -2.0}, {"error": "ValueError: no"}])
    assert found["splits"] == 2 and found["error"] == "ValueError: no" and found["log_likelihood"][0] == -1.5
    assert summarise([{"error": "ValueError: no"}]) == {"splits": 0, "error": "ValueError: no"}


def test_quick_run_needs_no_data_and_skips_what_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="yacht", rows=Rows(path))
    assert first["data"]["yacht"]["splits"] == 1 and first["data"]["yacht"]["error"] is None
    assert "| yacht | 1 |" in to_markdown(first)

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(uci_chains, "evaluate", unwanted)
    assert run(quick=True, only="yacht", rows=Rows(path))["splits"] == first["splits"]


def test_full_run_without_data_says_so(monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    text = to_markdown(run(quick=False, only="energy", rows=Rows()))
    assert "| energy | 0 | failed: FileNotFoundError: set KNOWABLE_DATA" in text
    assert PUBLISHED["energy"][0] == -1.38 and PUBLISHED["yacht"][0] == -1.18
