from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.compare_concrete import (
    FULL,
    METHODS,
    ScaledNetwork,
    Size,
    finished,
    kill_one,
    load,
    methods_of,
    run,
    take_up,
    to_markdown,
)
from benchmarks.study import Rows
from sklearn.base import clone

import knowable as kn
from knowable.registry import find_method


def test_full_size_is_the_one_promised():
    assert len(set(METHODS)) == 8 and methods_of(FULL) == list(METHODS)
    assert all(find_method(name).name == name for name in METHODS)


def test_concrete_is_read_from_the_folder_and_a_missing_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "uci").mkdir()
    np.savez(tmp_path / "uci" / "concrete.npz", x=np.ones((5, 8)), y=np.arange(5.0))
    monkeypatch.setenv("KNOWABLE_DATA", str(tmp_path))
    x, y = load(FULL)
    assert x.shape == (5, 8) and y.tolist() == [0, 1, 2, 3, 4]
    monkeypatch.delenv("KNOWABLE_DATA")
    with pytest.raises(FileNotFoundError, match="KNOWABLE_DATA"):
        load(FULL)


def test_estimator_predicts_in_the_units_of_the_table():
    # the same data in units 1,024 times smaller, which scales without rounding: the same fit, the same shape
    x, y = load(Size(rows=30))
    one, many = (
        clone(ScaledNetwork(kn.MAP(epochs=20), hidden=3)).fit(x, scale * y).predict_dist(x[:4])
        for scale in (1.0, 1024.0)
    )
    torch.testing.assert_close(many.mean, 1024 * one.mean, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(many.std, 1024 * one.std, rtol=1e-4, atol=1e-2)


def test_finished_fits_are_the_whole_lines_after_the_first(tmp_path):
    assert finished(tmp_path / "none") == []
    (tmp_path / "some").write_text("head\none\ntwo\nhal")
    assert finished(tmp_path / "some") == ["one", "two"]


@pytest.mark.slow
def test_quick_run_is_killed_taken_up_and_shows_its_ranking(tmp_path):
    found = run(quick=True, only="*", rows=Rows(tmp_path / "compare_concrete.jsonl"))
    assert found["killed"]["error"] is None and 3 <= found["killed"]["fits"] < found["killed"]["of"] == 9
    assert found["found"]["error"] is None and found["found"]["kept"] is True and found["found"]["not_run"] == []
    text = to_markdown(found)
    assert "finished fits were kept" in text and "| 1 | " in text and "of a budget of 120 s" in text
    html = (tmp_path / "compare_concrete.html").read_text()
    assert found["found"]["best"] in html and "Paired difference from the best" in html and "±" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare_concrete.html", "compare_concrete.jsonl"]


def test_a_comparison_that_cannot_run_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    killed = kill_one(FULL, tmp_path / "fits", str(tmp_path))
    assert "KNOWABLE_DATA" in killed["error"]
    assert take_up(FULL, tmp_path / "fits", killed, str(tmp_path)) == {"error": "nothing to take up"}
    environment = {
        "date": "d", "cpu": "c", "cores": 1, "threads": 1, "load": 0.0, "python": "3", "system": "s", "versions": {},
    }  # fmt: skip
    empty = {"benchmark": "b", "quick": False, "environment": environment, "size": {}, "killed": killed, "found": {}}
    assert "failed: " in to_markdown(empty)
