from __future__ import annotations

import math

import pytest
from benchmarks.in_between import DATA, GAP, RECIPE, REFERENCE, contenders, grid, run, spread, summary, to_markdown
from benchmarks.study import Rows, describe

import knowable as kn


def curve(value_of) -> list[float]:
    return [value_of(x) for x in grid().flatten().tolist()]


def test_spread_is_the_mean_over_both_sides_of_the_part_asked_for():
    gap_only = curve(lambda x: 1.0 if abs(x) < 0.51 else 0.0)
    assert spread(gap_only, GAP) == 1.0 and spread(gap_only, DATA) == 0.0
    slope = curve(abs)
    assert spread(slope, DATA) == pytest.approx(2.0, abs=0.05)


def test_summary_compares_with_the_reference_on_the_same_seed():
    flat = {"std": curve(lambda x: 1.0), "mean": curve(lambda x: 0.5), "seconds": 1.0}
    wide = {"std": curve(lambda x: 4.0 if abs(x) < 1 else 1.0), "mean": curve(lambda x: 0.0), "seconds": 3.0}
    found = summary({"0": flat, "1": {"error": "broken"}}, {"0": wide})
    assert found["ratio"] == pytest.approx(1.0)
    assert found["over_reference"] == pytest.approx(0.25)
    assert found["apart"] == pytest.approx(0.5)
    assert math.isnan(summary({"0": flat}, {})["over_reference"])


def test_methods_that_are_not_there_are_left_out():
    names = contenders(RECIPE)
    assert ("full rank" in names) is ("FullRankVI" in kn.__all__)
    assert {"mean-field", "function space, RBF kernel", REFERENCE} <= names.keys()


def test_quick_run_has_a_row_for_every_method_and_a_plot(tmp_path):
    found = run(quick=True, only="*", rows=Rows(tmp_path / "in_between.jsonl"))
    assert [fits["0"].get("error") for fits in found["methods"].values()] == [None] * len(found["methods"])
    text = to_markdown(found)
    assert all(f"| {title} |" in text for title in found["methods"])
    assert "R-hat of the function at most" in text
    assert (tmp_path / "in_between.png").stat().st_size > 10_000


def test_how_the_chains_mixed_is_said_by_the_worst_of_all_seeds():
    flat = {"std": curve(lambda x: 1.0), "mean": curve(lambda x: 0.5), "seconds": 1.0}
    chains = {"0": {**flat, "rhat": 1.004, "ess": 900}, "1": {**flat, "rhat": 1.021, "ess": 1200}, "2": {"error": "no"}}
    text = to_markdown(describe("in_between", quick=True, packages=(), methods={REFERENCE: chains}))
    assert "R-hat of the function at most 1.021, effective sample size at least 900." in text
