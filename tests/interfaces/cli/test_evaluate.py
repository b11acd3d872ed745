"""``knowable evaluate``: a run on rows whose outcomes are known."""

import json
import math

import pytest

from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import class_rows, number_rows, read_csv, write_csv


def test_scores_are_those_of_the_predictions_in_the_file(runs):
    path = write_csv(runs / "new.csv", number_rows(30, seed=5))
    result = call("evaluate", runs / "numbers", path, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    call("predict", runs / "numbers", path, "--out", runs / "pred.csv", "-q")
    rows = read_csv(runs / "pred.csv")
    errors = [float(row["mean"]) - float(truth["response"]) for row, truth in zip(rows, read_csv(path), strict=True)]
    assert found["rows"] == 30
    assert found["scores"]["rmse"]["value"] == pytest.approx(math.sqrt(sum(e * e for e in errors) / 30), rel=1e-5)
    held = [
        float(r["low"]) <= float(t["response"]) <= float(r["high"]) for r, t in zip(rows, read_csv(path), strict=True)
    ]
    assert found["scores"]["coverage_90"]["value"] == pytest.approx(sum(held) / 30, abs=1e-9)
    assert found["guess_without_inputs"]["rmse"]["value"] > found["scores"]["rmse"]["value"]


def test_people_see_a_table_with_standard_errors(runs):
    path = write_csv(runs / "new.csv", class_rows(40, seed=5))
    printed = call("evaluate", runs / "classes", path).stdout
    for word in ("side by Laplace", "40 rows of new.csv", "Accuracy", "Baseline without inputs", "±"):
        assert word in printed
    assert call("evaluate", runs / "classes", path, "--quiet").stdout == ""


def test_a_file_without_the_outcome_or_with_a_new_class_is_refused(runs):
    rows = class_rows(20, seed=5)
    bare = write_csv(runs / "bare.csv", [{"x": row["x"], "z": row["z"]} for row in rows])
    result = call("evaluate", runs / "classes", bare)
    assert result.exit_code == 2 and "'side'" in result.stderr and result.stderr.count("\n") == 1
    other = write_csv(runs / "other.csv", [{**row, "side": "beside"} for row in rows])
    result = call("evaluate", runs / "classes", other)
    assert result.exit_code == 2 and "beside" in result.stderr


def test_scores_on_the_training_file_are_called_too_good(runs):
    result = call("evaluate", runs / "numbers", runs / "numbers.csv")
    assert result.exit_code == 0 and "fitted to rows of numbers.csv" in result.stderr, result.stderr
    assert "scores.json" in result.stderr
    call("report", runs / "numbers", "--data", runs / "numbers.csv", "--out", runs / "seen.html")
    page = (runs / "seen.html").read_text()
    assert "fitted to rows of numbers.csv" in page and "not seen in the fit" not in page
    other = write_csv(runs / "new.csv", number_rows(30, seed=5))
    assert "fitted to rows" not in call("evaluate", runs / "numbers", other).stderr
    assert call("evaluate", runs / "numbers", runs / "numbers.csv", "-q").stderr == ""
