"""Folds come one after the other, the reference first; what is known is not fitted again, what is late is named."""

from __future__ import annotations

import numpy as np
import pytest

import knowable as kn
from knowable.comparison import run as running
from knowable.comparison.budget import Budget
from knowable.comparison.folds import Split
from knowable.comparison.journal import Journal, Record
from knowable.comparison.methods import Candidate
from knowable.comparison.problem import ModelProblem
from knowable.comparison.run import ComparisonRun, Conditions, Outcome, fits_to_make
from tests.comparison.cases import linear_problem

A, B, C = (Candidate(name, kn.MAP(epochs=number)) for number, name in enumerate("abc", 1))
SPLITS = [Split(np.arange(20), np.arange(20, 40)), Split(np.arange(20, 40), np.arange(20))]


@pytest.fixture
def fits(monkeypatch):
    """Fits that only note down what was asked for; ``c`` fails on the second fold."""
    made: list[tuple[str, int, bool]] = []

    def attempt(conditions, candidate, fold, split, *, seconds=None, reference="", truth=None):
        made.append((candidate.name, fold, truth is not None))
        error = "ValueError: no" if (candidate.name, fold) == ("c", 1) else None
        record = Record(candidate.name, candidate.settings, fold, reference, {"nll": 1.0, "seconds": 2.0}, error=error)
        return Outcome(record, object(), 2.0)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "attempt", attempt)
    return made


def make(journal: Journal, reference: Candidate | None = None, budget: Budget | None = None) -> ComparisonRun:
    conditions = Conditions(ModelProblem(*linear_problem()), 0, 8)
    made = ComparisonRun(conditions, (A, B, C), SPLITS, reference, journal, budget or Budget(None, 6))
    made.go(progress=False)
    return made


def test_every_method_meets_a_fold_before_the_next_one_begins(fits):
    run = make(Journal(None, {}))
    assert [(name, fold) for name, fold, _ in fits] == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("c", 1)]
    assert [record.error for record in run.records] == [None] * 5 + ["ValueError: no"]


def test_the_reference_is_fitted_first_and_given_to_the_others(fits):
    run = make(Journal(None, {}), reference=B)
    assert fits[:3] == [("b", 0, False), ("a", 0, True), ("c", 0, True)]
    assert [record.method for record in run.records[:3]] == ["a", "b", "c"]  # in the user's order
    assert [record.reference for record in run.records[:3]] == [B.settings, "", B.settings]


def test_what_is_in_the_journal_is_not_fitted_again_but_what_failed_is(fits):
    journal = Journal(None, {})
    first = make(journal)
    fits.clear()
    again = make(journal)
    assert fits == [("c", 1, False)] and len(again.records) == len(first.records)
    assert fits_to_make(journal, (A, B, C), SPLITS, None) == 1


def test_a_known_reference_is_fitted_again_for_the_sake_of_the_others_and_kept_once(fits):
    journal = Journal(None, {})
    journal.add(Record("b", B.settings, 0, scores={"nll": 0.5}))
    run = make(journal, reference=B)
    assert fits[:3] == [("b", 0, False), ("a", 0, True), ("c", 0, True)]
    of_b = [record for record in run.records if record.method == "b" and record.fold == 0]
    assert [record.scores["nll"] for record in of_b] == [0.5]


def test_a_finished_fold_needs_no_reference(fits):
    journal = Journal(None, {})
    for candidate in (A, B, C):
        journal.add(Record("x", candidate.settings, 0, "" if candidate is B else B.settings, {"nll": 0.5}))
    run = make(journal, reference=B)
    assert all(fold == 1 for _, fold, _ in fits)
    assert [record.method for record in run.records[:3]] == ["a", "b", "c"]  # under the names of this comparison


def test_fits_without_time_are_named_and_not_begun(fits):
    clock = iter(float(number) for number in range(0, 10_000, 4))  # every look at it takes four seconds
    run = make(Journal(None, {}), budget=Budget(60.0, 6, clock=lambda: next(clock)))
    assert 0 < len(fits) < 6 and len(fits) + len(run.not_run) == 6
    done = {(name, fold) for name, fold, _ in fits}
    assert all(pair not in done for pair in run.not_run)


def test_a_resumed_run_counts_only_the_fits_that_are_left(fits):
    journal = Journal(None, {})
    assert fits_to_make(journal, (A, B, C), SPLITS, B) == 6
    journal.add(Record("a", A.settings, 0, B.settings, {"nll": 1.0}))
    journal.add(Record("a", A.settings, 1, "", {"nll": 1.0}))  # held against nothing: of no use here
    assert fits_to_make(journal, (A, B, C), SPLITS, B) == 5
