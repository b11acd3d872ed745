"""The printed table: ranked, aligned, with the reasons below it."""

from __future__ import annotations

from knowable.comparison.journal import Record
from knowable.comparison.report import ranking_listing
from knowable.comparison.text import as_text, findings, lacking, troubles
from tests.comparison.cases import THREE, made_up, record


def test_rows_are_ranked_with_ties_marked_and_numbers_have_their_errors():
    lines = as_text(made_up(THREE, facts={"Rows": "1,030"})).splitlines()
    assert lines[0] == "Comparison of 3 methods on 1,030 rows, 3 folds"
    rows = [line.split() for line in lines[3:6]]
    assert [row[:2] for row in rows] == [["1", "a"], ["2=", "b"], ["3", "c"]]
    assert "2.00 ± 0.58" in lines[3] and lines[3].endswith("best")
    assert "+0.100 ± 0.058" in lines[4] and "+3 ± 0" in lines[5]


def test_columns_line_up():
    lines = as_text(made_up({"a": [1.0, 2.0], "a much longer name": [100.0, 300.0]})).splitlines()
    header, first, second = lines[2:5]
    end = header.index("nll") + len("nll")
    assert first[end - 1] != " " and second[end - 1] != " " and first[end] == second[end] == " "


def test_missing_folds_are_counted_and_their_reasons_come_last():
    found = made_up({"a": [1.0, 2.0], "b": [1.0, float("nan")]}, not_run=(("b", 1),), notices=("Mind the gap.",))
    text = as_text(found)
    assert "(1 of 2 folds)" in text and "Mind the gap." in text
    assert text.splitlines()[-1] == "b, fold 2: not run: the budget was spent"


def test_a_comparison_prints_as_its_table():
    assert repr(made_up(THREE)) == as_text(made_up(THREE))


def test_findings_name_the_best_the_tied_and_the_worse():
    said = findings(made_up(THREE))
    assert said == [
        "a has the lowest NLL: 2.00 ± 0.58.",
        "Within two standard errors of it: b.",
        "Worse: c by 3 ± 0.",
    ]


def test_one_fold_is_too_few_to_tell():
    assert findings(made_up({"a": [1.0], "b": [2.0], "c": [3.0]}))[-1] == "Too few folds to tell it apart from b and c."


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


def test_fits_that_did_not_converge_are_named_in_the_text_the_table_and_the_page():
    records = [
        Record("a", "a", 0, scores={"nll": 1.0}, converged=True),
        Record("a", "a", 1, scores={"nll": 1.0}, converged=False, message="ended too early"),
        Record("b", "b", 0, scores={"nll": 2.0}, converged=None),
    ]
    found = made_up({"a": [1.0, 1.0], "b": [2.0]}, records=tuple(records))
    assert as_text(found).splitlines()[-1] == "a: did not converge in 1 of 2 fits (ended too early)"
    assert [row["not_converged"] for row in found.table] == [1, 0]
    assert ("a", "did not converge in 1 of 2 fits (ended too early)") in troubles(found)
    assert [row[-1] for row in ranking_listing(found).rows] == ["not in 1 of 2", "yes"]
