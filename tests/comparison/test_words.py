"""Sentences say what the numbers say."""

from __future__ import annotations

from knowable.comparison.journal import Record
from knowable.comparison.text import READING, VERDICTS, findings, lacking, title, troubles
from tests.comparison.cases import THREE, made_up, record


def test_findings_name_the_best_the_tied_and_the_worse():
    said = findings(made_up(THREE))
    assert said == [
        "a has the lowest NLL: 2.00 ± 0.58.",
        "Within two standard errors of it: b.",
        "Worse: c by 3 ± 0.",
    ]


def test_one_fold_is_too_few_to_tell():
    assert (
        findings(made_up({"a": [1.0], "b": [2.0], "c": [3.0]}))[-1]
        == "There are too few folds to tell it from b and c."
    )


def test_title_counts_in_words():
    assert title(made_up({"a": [1.0]}, facts={"Rows": "12"})) == "Comparison of 1 method on 12 rows, 1 fold"
    assert title(made_up(THREE)) == "Comparison of 3 methods, 3 folds"


def test_troubles_join_folds_with_the_same_reason_and_count_warnings():
    records = [
        record("a", 0, nll=1.0),
        Record("b", "b", 0, error="ValueError: no"),
        Record("b", "b", 1, error="ValueError: no"),
        Record("c", "c", 0, scores={"nll": 1.0}, warnings=("slow",)),
        Record("c", "c", 1, scores={"nll": 1.0}, warnings=("slow", "odd")),
    ]
    found = made_up(THREE, records=tuple(records), folds=3, not_run=(("b", 2),))
    assert lacking(found) == [("b, fold 3", "not run: the budget was spent"), ("b, folds 1, 2", "ValueError: no")]
    assert troubles(found)[2:] == [("c", "slow (in 2 of 3 fits)"), ("c", "odd")]


def test_every_verdict_has_words_and_every_term_an_explanation():
    assert set(VERDICTS) == {"best", "tied", "worse", "unclear"} and all(text for _, text in READING)
