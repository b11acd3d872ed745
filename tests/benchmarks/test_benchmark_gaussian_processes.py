from __future__ import annotations

import pytest
from benchmarks.gaussian_processes import DATA, METHODS, PUBLISHED, Recipe, evaluate, run, to_markdown
from benchmarks.study import Rows
from benchmarks.uci_data import synthetic


@pytest.mark.parametrize("method", METHODS)
def test_a_plane_is_predicted_to_its_noise(method):
    row = evaluate(method, synthetic(), Recipe(inducing=8, steps=600, samples=8), seed=0)
    most = 9 if method == "DeepGaussianProcess" else 3  # so few steps do not bring it to the end
    assert row["rmse"] < most and row["log_likelihood"] > -4  # noise of 1, rows that vary by 17


def test_every_row_has_a_published_one_and_the_study_goes_on_where_it_stopped(tmp_path, monkeypatch):
    assert all(name in PUBLISHED[method] for name in DATA for method in METHODS)
    rows = Rows(tmp_path / "rows.jsonl")
    found = run(quick=True, only="yacht", rows=rows)
    assert len(rows) == len(METHODS) and not any(row["error"] for row in found["data"]["yacht"].values())
    monkeypatch.setattr("benchmarks.gaussian_processes.evaluate", None)
    assert run(quick=True, only="yacht", rows=Rows(tmp_path / "rows.jsonl"))["data"] == found["data"]
    text = to_markdown(found)
    assert "DeepGaussianProcess" in text and "-0.458" in text and "failed" not in text
