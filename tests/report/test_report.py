"""The content of a report is right before anything is drawn."""

import json
import math

import pytest

from knowable.errors import InvalidArgument
from knowable.report import Column, score_table
from tests.interfaces.cases import whole_report

LOWER = Column("nll", "NLL", decimals=2)
HIGHER = Column("accuracy", "Accuracy", better="higher", percent=True, decimals=1)
TARGET = Column("coverage", "Coverage", better="target", target=0.9, percent=True, decimals=0)
NEUTRAL = Column("seconds", "Seconds", better="none")


def test_the_best_of_each_column_is_marked_by_its_own_direction():
    scores = {
        "a": {"nll": 1.0, "accuracy": 0.80, "coverage": 0.99, "seconds": 1.0},
        "b": {"nll": 2.0, "accuracy": 0.95, "coverage": 0.70, "seconds": 2.0},
        "c": {"nll": 3.0, "accuracy": 0.90, "coverage": 0.88, "seconds": 0.1},
    }
    table = score_table("t", scores, [LOWER, HIGHER, TARGET, NEUTRAL])
    marked = {
        column.key: [name for name, cells in table.rows if cells[place].mark]
        for place, column in enumerate(table.columns)
    }
    assert marked == {"nll": ["a"], "accuracy": ["b"], "coverage": ["c"], "seconds": []}


def test_methods_within_a_joint_standard_error_of_the_best_are_tied():
    scores = {"best": {"nll": 1.0}, "near": {"nll": 1.49}, "far": {"nll": 1.51}}
    errors = {name: {"nll": 0.5 / math.sqrt(2)} for name in scores}  # together exactly 0.5
    table = score_table("t", scores, [LOWER], standard_errors=errors)
    assert [cells[0].mark for _, cells in table.rows] == ["best", "tied", ""]


def test_equal_scores_share_the_mark():
    table = score_table("t", {"a": {"nll": 1.0}, "b": {"nll": 1.0}}, [LOWER])
    assert [cells[0].mark for _, cells in table.rows] == ["best", "best"]


def test_a_single_method_is_not_called_the_best():
    assert score_table("t", {"a": {"nll": 1.0}}, [LOWER]).cell("a", "nll").mark == ""


def test_missing_and_infinite_scores_show_a_dash_and_never_win():
    scores = {"a": {"nll": math.nan}, "b": {}, "c": {"nll": 5.0}, "d": {"nll": 4.0}, "e": {"nll": -math.inf}}
    table = score_table("t", scores, [LOWER], standard_errors={"c": {"nll": math.nan}, "d": {"nll": math.inf}})
    assert [(cells[0].text, cells[0].mark) for _, cells in table.rows] == [
        ("–", ""),
        ("–", ""),
        ("5.00", ""),
        ("4.00", "best"),
        ("–", ""),
    ]


def test_values_and_errors_are_shown_with_the_columns_digits():
    errors = {"a": {"accuracy": 0.0123}}
    cell = score_table("t", {"a": {"accuracy": 0.98765}}, [HIGHER], standard_errors=errors).cell("a", "accuracy")
    assert (cell.text, cell.error_text, cell.value) == ("98.8%", "± 1.2%", 0.98765)


def test_a_table_says_whether_it_has_standard_errors():
    scores = {"a": {"nll": 1.0}}
    assert not score_table("t", scores, [LOWER]).has_errors
    assert score_table("t", scores, [LOWER], standard_errors={"a": {"nll": 0.1}}).has_errors


def test_a_report_is_plain_data(generator):
    content = whole_report(generator, "label").to_dict()
    again = json.loads(json.dumps(content))
    assert again["sections"][0]["tables"][0]["rows"][0][0] == "label"
    kinds = [panel["kind"] for panel in again["sections"][0]["panels"]]
    own = ["truth", "lines", "bars", "dependence", "dependence", "traces"]
    assert kinds == ["band", "noise", "calibration", "calibration", "curves", *own, "pictures"]


@pytest.mark.parametrize("arguments", [{"better": "target"}, {"target": 0.9}, {"better": "smaller"}])
def test_a_column_that_contradicts_itself_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        Column("key", "label", **arguments)
