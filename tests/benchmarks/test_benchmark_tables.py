"""The benchmark of tables: scores by their definitions, and a run that goes on where it was stopped."""

from __future__ import annotations

import math
import sys

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from benchmarks import tables


def _frame() -> tuple[pd.DataFrame, str]:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=80), rng.choice(["x", "y"], 80)
    return pd.DataFrame({"a": a, "b": b, "y": 2 * a + (b == "x") + rng.normal(size=80)}), "y"


def test_there_are_at_least_eighteen_tables():
    assert len(tables.TABLES) >= 18


def test_scores_are_those_of_a_normal_prediction():
    y, mean, std = np.array([1.0, 2.0]), np.array([0.0, 2.5]), np.array([1.0, 2.0])
    found = tables._scores(stats.norm.logpdf(y, mean, std), mean, y, np.array([1.0, 0.0]))
    assert found["nll"] == pytest.approx(0.5 * math.log(2 * math.pi) + 0.5 * math.log(2) + (1 + 0.0625) / 4)
    assert found["rmse"] == pytest.approx(math.sqrt(1.25 / 2)) and found["coverage"] == 0.5
    classes = tables._class_scores(np.array([[0.8, 0.2], [0.6, 0.4]]), np.array([0, 1]))
    assert classes["nll"] == pytest.approx(-(math.log(0.8) + math.log(0.4)) / 2) and classes["accuracy"] == 0.5


def test_a_peer_without_a_spread_has_that_of_its_residuals_in_cross_validation():
    from sklearn.dummy import DummyRegressor

    y = np.random.default_rng(0).normal(3.0, 2.0, 4_000)
    mean, std = tables.Regressor(DummyRegressor).fit(np.zeros((4_000, 1)), y).predict(np.zeros((5, 1)))
    np.testing.assert_allclose(mean, y.mean())
    np.testing.assert_allclose(std, y.std(), rtol=1e-3)  # folds have their own means


def test_a_run_goes_on_where_it_was_stopped_and_a_method_that_failed_is_run_again(tmp_path, monkeypatch):
    calls = []

    def run_one(table: str, method: str, fold: int, folds: int) -> dict:
        calls.append((table, method, fold))
        if len(calls) == 1:
            raise RuntimeError("once")
        return {"table": table, "method": method, "fold": fold, "rows": 80, "nll": 1.0, "rmse": 2.0, "coverage": 0.9,
                "log_prob": [-0.5, -1.5], "chosen": "MAP()", "likelihood": "Gaussian()"}  # fmt: skip

    monkeypatch.setattr(tables, "TABLES", {"cars": _frame})
    monkeypatch.setattr(tables, "run_one", run_one)
    out = tmp_path / "rows.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["tables", "--tables", "cars", "--methods", "guess,knowable", "--folds", "1", "--out", str(out)]
    )
    for _ in range(3):
        tables.main()
    assert [method for _, method, _ in calls] == ["guess", "knowable", "guess"]
    assert "| cars | 80 | **1.000** |" in tables.shown(tables.paired(tables._read(out)))
