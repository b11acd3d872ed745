"""Scores know which way is better, and numbers have the digits that their errors leave them."""

from __future__ import annotations

import math

import pytest

from knowable.comparison.scores import BY_NAME, KINDS, ScoreKind, kinds_in, ranking_kind, shown, with_error
from knowable.errors import InvalidArgument


def test_every_score_is_explained_once():
    assert len(BY_NAME) == len(KINDS) and all(kind.help and kind.label for kind in KINDS)
    assert all((kind.target is not None) == (kind.better == "target") for kind in KINDS)


def test_scores_come_in_the_order_of_tables_whatever_the_order_they_are_named_in():
    assert [kind.name for kind in kinds_in(["seconds", "nll", "rmse", "unknown"])] == ["nll", "rmse", "seconds"]


@pytest.mark.parametrize(("name", "words"), [("nll", "lower"), ("accuracy", "higher"), ("coverage_90", "0.9 is right")])
def test_direction_is_said_in_words(name, words):
    assert words in BY_NAME[name].direction


def test_methods_cannot_be_ranked_by_a_score_without_a_direction_or_one_that_is_not_there():
    assert ranking_kind("crps", ["crps"]).name == "crps"
    for name in ("coverage_90", "mean_entropy", "rmse"):
        with pytest.raises(InvalidArgument, match=f"one that ranks methods: crps; got '{name}'"):
            ranking_kind(name, ["crps", "coverage_90", "mean_entropy"])


def test_unknown_direction_is_refused():
    with pytest.raises(InvalidArgument, match="better"):
        ScoreKind("a", "a", "sideways", "a")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (2.94321, 0.0321, "2.943 ± 0.032"),
        (2.94321, 0.321, "2.94 ± 0.32"),
        (29432.1, 321.0, "29432 ± 321"),
        (0.0000001234, 1e-12, "0.000000 ± 0.000000"),
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
