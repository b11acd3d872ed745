"""``knowable predict``: a run on new rows."""

import json

import pytest

from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import class_rows, number_rows, read_csv, write_csv


def new_numbers(folder, **changes):
    rows = [{key: value for key, value in row.items() if key != "response"} for row in number_rows(20, seed=1)]
    return write_csv(folder / "new.csv", [{**row, **changes} for row in rows])


def test_every_row_gets_mean_interval_and_spread_under_its_line(runs):
    result = call("predict", runs / "numbers", new_numbers(runs), "--out", runs / "pred.csv", "--level", "0.8")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "" and "20 predictions" in result.stderr
    rows = read_csv(runs / "pred.csv")
    assert [int(row["line"]) for row in rows] == list(range(2, 22))
    for row in rows:
        assert float(row["low"]) < float(row["mean"]) < float(row["high"])
        assert float(row["std"]) >= float(row["epistemic_std"]) >= 0


def test_predictions_are_near_what_comes_and_the_interval_holds_most(runs):
    # outcomes have noise of sd 0.3 around a line the run has learned; 90% of 20 is 18, and 12 leaves room for chance
    truth = [float(row["response"]) for row in number_rows(20, seed=1)]
    call("predict", runs / "numbers", new_numbers(runs), "--out", runs / "pred.csv", "-q")
    rows = read_csv(runs / "pred.csv")
    held = [float(row["low"]) <= y <= float(row["high"]) for row, y in zip(rows, truth, strict=True)]
    assert sum(held) >= 12


def test_standard_input_and_output_make_a_pipe(runs):
    text = new_numbers(runs).read_text()
    result = call("predict", runs / "numbers", "-", stdin=text)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("line,mean,std,low,high") and len(lines) == 21
    assert call("predict", runs / "numbers", "-", "--out", "-", stdin=text).stdout == result.stdout


def test_classes_get_probabilities_and_machines_get_json(runs):
    path = write_csv(runs / "new.csv", [{"x": row["x"], "z": row["z"]} for row in class_rows(10, seed=2)])
    result = call("predict", runs / "classes", path, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == 10 and {row["label"] for row in rows} <= {"above", "below"}
    assert all(row["p(above)"] + row["p(below)"] == pytest.approx(1.0, abs=1e-6) for row in rows)


def test_the_same_rows_get_the_same_predictions_and_columns_may_be_in_any_order(runs):
    path = new_numbers(runs)
    first = call("predict", runs / "numbers", path).stdout
    turned = write_csv(runs / "turned.csv", [dict(reversed(list(row.items()))) for row in read_csv(path)])
    assert call("predict", runs / "numbers", turned).stdout == first


def test_a_file_is_not_overwritten_without_force(runs):
    (runs / "pred.csv").write_text("mine")
    path = new_numbers(runs)
    result = call("predict", runs / "numbers", path, "--out", runs / "pred.csv")
    assert result.exit_code == 2 and "--force" in result.stderr and (runs / "pred.csv").read_text() == "mine"
    assert call("predict", runs / "numbers", path, "--out", runs / "pred.csv", "--force").exit_code == 0
    assert (runs / "pred.csv").read_text().startswith("line,")


def test_what_looks_wrong_is_refused_unless_one_is_lenient(runs):
    message, path = "other units", new_numbers(runs, dose="1e9")
    result = call("predict", runs / "numbers", path, "--out", runs / "pred.csv")
    assert result.exit_code == 2 and message in result.stderr and "--lenient" in result.stderr
    assert result.stderr.count("\n") == 1 and not (runs / "pred.csv").exists()
    lenient = call("predict", runs / "numbers", path, "--out", runs / "pred.csv", "--lenient")
    assert lenient.exit_code == 0 and "warning: " in lenient.stderr and message in lenient.stderr
    assert len(read_csv(runs / "pred.csv")) == 20


def test_a_column_that_is_missing_or_of_another_type_is_named(runs):
    rows = read_csv(new_numbers(runs))
    less = write_csv(runs / "less.csv", [{k: v for k, v in row.items() if k != "dose"} for row in rows])
    result = call("predict", runs / "numbers", less)
    assert result.exit_code == 2 and "dose" in result.stderr and result.stdout == ""
    rows[4]["dose"] = "plenty"
    result = call("predict", runs / "numbers", write_csv(runs / "text.csv", rows), "--lenient")
    assert result.exit_code == 2 and "line 6" in result.stderr and "'plenty'" in result.stderr


@pytest.mark.parametrize("level", ["0", "1", "90"])
def test_a_level_is_a_share(level, runs):
    result = call("predict", runs / "numbers", new_numbers(runs), "--level", level)
    assert result.exit_code == 2 and "level must be" in result.stderr


def test_something_that_is_no_run_is_refused(runs):
    for place in (runs, runs / "nothing"):
        result = call("predict", place, new_numbers(runs))
        assert result.exit_code == 2 and "knowable fit" in result.stderr


def test_an_altered_run_is_refused(runs):
    tensors = next((runs / "numbers" / "posterior").glob("tensors-*"))
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    result = call("predict", runs / "numbers", new_numbers(runs))
    assert result.exit_code == 2 and "altered" in result.stderr and result.stderr.count("\n") == 1
