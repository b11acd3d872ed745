"""Tables of scores mark the best, and numbers have the digits that their errors leave them."""

import math

import pytest
import torch

from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import InvalidArgument
from knowable.evaluation.evaluate import evaluate
from knowable.likelihoods.categorical import CategoricalPrediction
from knowable.report.scores import SCORES, ScoreColumn, score_table, shown, with_error

LOWER = ScoreColumn("nll", "NLL", decimals=2)
HIGHER = ScoreColumn("accuracy", "Accuracy", better="higher", percent=True, decimals=1)
TARGET = ScoreColumn("coverage", "Coverage", better="target", target=0.9, percent=True, decimals=0)
NEUTRAL = ScoreColumn("seconds", "Seconds", better="none")


def test_the_best_of_each_column_is_marked_by_its_own_direction():
    scores = {
        "a": {"nll": 1.0, "accuracy": 0.80, "coverage": 0.99, "seconds": 1.0},
        "b": {"nll": 2.0, "accuracy": 0.95, "coverage": 0.70, "seconds": 2.0},
        "c": {"nll": 3.0, "accuracy": 0.90, "coverage": 0.88, "seconds": 0.1},
    }
    table = score_table("t", scores, [LOWER, HIGHER, TARGET, NEUTRAL])
    marked = {
        column.name: [name for name, cells in table.rows if cells[place].mark]
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


@pytest.mark.parametrize("arguments", [{"better": "target"}, {"target": 0.9}, {"better": "smaller"}])
def test_a_column_that_contradicts_itself_is_refused(arguments):
    with pytest.raises(InvalidArgument):
        ScoreColumn("key", "label", **arguments)


@pytest.mark.parametrize(
    ("name", "words"), [("nll", "lower"), ("accuracy", "higher"), ("coverage_90", "90.0% is right")]
)
def test_direction_is_said_in_words(name, words):
    assert words in SCORES[name].direction and SCORES[name].help


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (2.94321, 0.0321, "2.943 ± 0.032"),
        (2.94321, 0.321, "2.94 ± 0.32"),
        (29432.1, 321.0, "29432 ± 321"),
        (0.0000001234, 1e-12, "1.234000e-07 ± 1.0e-12"),
        (1.0, 0.0, "1 ± 0"),
        (1.23456, math.nan, "1.235"),
        (123456.7, math.nan, "123457"),
        (math.inf, math.nan, "∞"),
        (-math.inf, 1.0, "-∞"),
        (math.nan, math.nan, "–"),
    ],
)
def test_numbers_have_the_digits_their_errors_leave(value, error, text):
    assert with_error(value, error) == text
    assert shown(value, error) == text.partition(" ± ")[0]


def test_differences_show_their_sign():
    assert with_error(0.5, 0.1, sign=True) == "+0.50 ± 0.10"
    assert with_error(-0.5, 0.1, sign=True) == "-0.50 ± 0.10"
    assert with_error(math.nan, 0.1, sign=True) == "–"


def test_every_score_of_an_evaluation_has_a_column():
    numbers = RegressionPrediction(NormalComponents(torch.zeros(2, 3), torch.ones(1)), torch.zeros(2).log_softmax(0))
    classes = CategoricalPrediction(torch.zeros(2, 3, 4).log_softmax(-1), torch.zeros(2).log_softmax(0))
    for prediction, y in ((numbers, torch.zeros(3)), (classes, torch.tensor([0, 1, 2]))):
        assert set(evaluate(prediction, y)) <= set(SCORES)
