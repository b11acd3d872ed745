from __future__ import annotations

import json

import pytest
from benchmarks.environment import Environment
from benchmarks.harness import Case, Outcome, Plan
from benchmarks.report import describe_case, describe_run, to_markdown, with_earlier_cases, write


@pytest.fixture
def run():
    case = Case("pair", "A pair", {"slow": _unused, "fast": _unused, "gone": _unused}, reference="slow", note="A note.")
    outcomes = {
        "slow": Outcome([10.0, 12.0, 14.0], memory={"built": 1.2, "peak": 30.4}),
        "fast": Outcome([5.0, 6.0, 3.5], memory={"error": "OSError: no"}),
        "gone": Outcome(error="ModuleNotFoundError: No module named 'a|b'"),
    }
    described = describe_case(case, Plan(rounds=3, inner=2), outcomes)
    return describe_run("example", [described], Environment.now([]), quick=False)


def _unused():
    raise AssertionError("a report builds nothing")


def test_data_has_times_ratios_and_errors(run):
    contenders = run["cases"][0]["contenders"]
    assert contenders["slow"]["time"] == {"median": 12.0, "lower": 11.0, "upper": 13.0, "minimum": 10.0}
    assert contenders["fast"]["ratio"] == {"median": 0.5, "lower": 0.375, "upper": 0.5, "minimum": 0.25}
    assert contenders["gone"]["time"] is None and contenders["gone"]["ratio"] is None
    assert contenders["fast"]["milliseconds"] == [5.0, 6.0, 3.5]


def test_table_has_a_row_for_everybody(run):
    lines = to_markdown(run).splitlines()
    assert "| slow | 1.00 | 1.00–1.00 | 12 | 11–13 | 10 | 1 | 30 |" in lines
    assert "| fast | 0.50 | 0.38–0.50 | 5 | 4.25–5.5 | 3.5 |  | failed: OSError: no |" in lines
    assert "| gone | failed: ModuleNotFoundError: No module named 'a\\|b' |  |  |  |  |  |  |" in lines
    assert "Ratio to *slow*; 3 rounds of 2 steps. A note." in lines


def test_table_without_memory_has_no_columns_for_it(run):
    for contender in run["cases"][0]["contenders"].values():
        contender["memory"] = None
    rows = [line for line in to_markdown(run).splitlines() if line.startswith("|")]
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}


def test_quick_run_says_that_it_is_no_measurement(run):
    assert "Quick run" not in to_markdown(run)
    assert "Quick run" in to_markdown({**run, "quick": True})


def test_files_are_written_whole_and_replace_older_ones(run, tmp_path):
    folder = tmp_path / "new" / "folder"
    write({**run, "quick": True}, folder)
    data, page = write(run, folder)
    assert json.loads(data.read_text()) == run
    assert page.read_text() == to_markdown(run)
    assert sorted(path.name for path in folder.iterdir()) == ["example.json", "example.md"]


def test_a_run_of_some_cases_keeps_the_others_with_their_date(run, tmp_path):
    (pair,) = run["cases"]
    assert with_earlier_cases(run, tmp_path) == run
    write({**run, "cases": [pair, {**pair, "name": "other", "note": ""}]}, tmp_path)
    later = {**run, "environment": {**run["environment"], "date": "later"}, "cases": [{**pair, "note": "New."}]}
    kept = with_earlier_cases(later, tmp_path)
    assert [case["name"] for case in kept["cases"]] == ["other", "pair"]
    assert f"2 steps. Measured {run['environment']['date']}." in to_markdown(kept)
    assert "2 steps. New.\n" in to_markdown(kept)
    write(kept, tmp_path)
    again = with_earlier_cases({**later, "cases": []}, tmp_path)
    assert [case["measured"] for case in again["cases"]] == [run["environment"]["date"], "later"]
    assert with_earlier_cases({**later, "quick": True}, tmp_path)["cases"] == later["cases"]
