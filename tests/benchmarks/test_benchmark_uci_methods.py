from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.study import Rows
from benchmarks.uci_data import cut, synthetic
from benchmarks.uci_methods import (
    DATA,
    METHODS,
    RECIPE,
    Recipe,
    Setting,
    choose,
    evaluate,
    fit,
    reached,
    run,
    summarise,
    to_markdown,
)
from benchmarks.uci_published import PUBLISHED, SOURCES

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


def test_methods_learn_a_plane_better_than_its_mean():
    # targets have standard deviation 17 and noise 1; 400 steps of a small network are plenty to get below a half
    recipe = replace(TINY, hidden=(20,), snapshots=10)
    split = synthetic()
    spread = split.test_y.std().item()
    for method in METHODS:
        assert (
            evaluate(method, split, replace(recipe.grid(method)[0], epochs=400), recipe, seed=0)["rmse"] < 0.5 * spread
        )


def test_ensemble_and_swag_have_the_settings_of_the_point_estimate():
    assert TINY.grid("DeepEnsemble") == TINY.grid("SWAG") == TINY.grid("MAP") == POINT
    assert TINY.grid("MCDropout") == DROPOUT and len(TINY.grid("Laplace")) == 1


def test_noise_of_the_input_gives_the_network_a_second_output():
    split = synthetic()
    constant, other = (fit("MAP", split, setting, TINY, seed=0).model for setting in POINT)
    x = torch.zeros(1, split.x.shape[1])
    assert constant.net(x).shape == (1, 1) and other.net(x).shape == (1, 2)


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


def test_choice_is_made_once_for_those_that_share_it(tmp_path, monkeypatch):
    calls = []

    def counted(judge, *_, **__):
        calls.append(judge)
        return {"chosen": 0, "seconds": 0.0, "error": None}

    monkeypatch.setattr(uci_methods, "choose", counted)
    run(quick=True, only="yacht", rows=Rows(tmp_path / "rows.jsonl"))
    assert calls == ["MAP", "MCDropout", "DeepEnsemble"]  # SWAG has the point estimate's


def test_rows_outlive_changes_that_do_not_concern_them():
    changed = replace(TINY, dropout=DROPOUT[:1])
    assert changed.of("MAP") == TINY.of("MAP") and changed.of("MCDropout") != TINY.of("MCDropout")
    assert replace(TINY, point=()).of("MCDropout") == TINY.of("MCDropout")
    assert replace(TINY, hidden=(7,)).of("SWAG") != TINY.of("SWAG")
    assert str(replace(TINY, splits=7).of("SWAG")) == str(TINY.of("SWAG"))  # more splits, the same rows


def test_reached_means_within_one_standard_error_of_ours():
    assert reached((-1.05, 0.1), (-1.0, 0.5), higher=True) and not reached((-1.2, 0.1), (-1.0, 0.5), higher=True)
    assert reached((3.1, 0.2), (3.0, 0.0), higher=False) and not reached((3.3, 0.2), (3.0, 0.0), higher=False)
    assert not reached((3.1, math.nan), (3.0, 0.0), higher=False)


def test_failed_splits_are_counted_out_and_named():
    row = {"log_likelihood": -1.0, "rmse": 2.0, "seconds": 3.0, "choosing": 4.0, "setting": "a", "error": None}
    found = summarise([row, {**row, "log_likelihood": -2.0, "setting": "b"}, row, {"error": "ValueError: no"}])
    assert found["splits"] == 3 and found["error"] == "ValueError: no"
    assert found["log_likelihood"][0] == pytest.approx(-4 / 3) and found["chosen"] == {"a": 2, "b": 1}
    assert summarise([{"error": "ValueError: no"}]) == {"splits": 0, "error": "ValueError: no"}


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


def test_full_run_without_data_says_so(monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    text = to_markdown(run(quick=False, only="energy", rows=Rows()))
    assert "| energy | MAP | 0 | failed: FileNotFoundError: set KNOWABLE_DATA" in text


def test_every_method_has_a_published_row_and_its_source_on_every_data_set():
    assert set(PUBLISHED) == set(SOURCES) == set(METHODS)
    assert all(set(rows) == set(DATA) for rows in PUBLISHED.values())
    assert [method for method in METHODS if SOURCES[method].same_method] == ["MCDropout", "DeepEnsemble"]
    assert len(set(map(str, RECIPE.point))) == len(RECIPE.point)
    assert len(set(map(str, RECIPE.dropout))) == len(RECIPE.dropout)
