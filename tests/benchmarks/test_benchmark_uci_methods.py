from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.study import Rows
from benchmarks.uci_data import cut, synthetic
from benchmarks.uci_methods import (
    METHODS,
    Recipe,
    Setting,
    choose,
    evaluate,
    reached,
    run,
    to_markdown,
)

from benchmarks import uci_methods

POINT = (Setting("constant", 1.0, 20), Setting("input", 1.0, 20))
DROPOUT = (Setting("constant", 1.0, 20, rate=0.05), Setting("input", 1.0, 20, rate=0.2))
TINY = Recipe(POINT, DROPOUT, Setting(epochs=20), hidden=(4,), members=2, snapshots=3, samples=8)


@pytest.mark.parametrize("method", METHODS)
def test_log_likelihood_is_in_the_units_of_the_target(method):
    # units 1,024 times smaller: densities fall by that factor, errors grow by it. A power of two scales without
    # rounding, so that both fits see the same standardised numbers; what is left is float32's 1e-7
    generator = np.random.default_rng(1)
    x = generator.standard_normal((24, 2))
    y, test = x.sum(1), np.arange(24) % 4 == 0
    setting = TINY.grid(method)[0]
    one, many = (evaluate(method, cut(x, scale * y, test), setting, TINY, seed=0) for scale in (1.0, 1024.0))
    assert many["log_likelihood"] == pytest.approx(one["log_likelihood"] - math.log(1024), abs=1e-4)
    assert many["rmse"] == pytest.approx(1024 * one["rmse"], rel=1e-4)


def test_choice_takes_the_setting_with_the_highest_validation_score_and_never_sees_test_rows(monkeypatch):
    split, seen = synthetic(), []
    tested = {tuple(row.tolist()) for row in split.test_x}

    def judged(method, part, setting, recipe, *, seed):
        seen.extend(tuple(row.tolist()) for row in torch.cat([part.x, part.test_x]))
        return {"log_likelihood": -1.0 if setting.noise == "input" else -2.0}

    monkeypatch.setattr(uci_methods, "evaluate", judged)
    found = choose("MCDropout", split, TINY, seed=0)
    assert found["chosen"] == 1 and found["log_likelihoods"] == [-2.0, -1.0]
    assert seen and not tested & set(seen)


def test_reached_means_within_one_standard_error_of_ours():
    assert reached((-1.05, 0.1), (-1.0, 0.5), higher=True) and not reached((-1.2, 0.1), (-1.0, 0.5), higher=True)
    assert reached((3.1, 0.2), (3.0, 0.0), higher=False) and not reached((3.3, 0.2), (3.0, 0.0), higher=False)
    assert not reached((3.1, math.nan), (3.0, 0.0), higher=False)


@pytest.mark.slow
def test_quick_run_needs_no_data_and_skips_what_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    path = tmp_path / "rows.jsonl"
    first = run(quick=True, only="yacht", rows=Rows(path))
    assert {method: each["error"] for method, each in first["data"]["yacht"].items()} == dict.fromkeys(METHODS)
    text = to_markdown(first)
    assert all(f"| yacht | {method} | 1 |" in text for method in METHODS)
    assert "## What was chosen" in text and "Lakshminarayanan" in text

    def unwanted(*_, **__):
        raise AssertionError("ran again")

    monkeypatch.setattr(uci_methods, "evaluate", unwanted)
    assert run(quick=True, only="yacht", rows=Rows(path))["splits"] == first["splits"]
