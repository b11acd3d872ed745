"""One fit is scored like by hand, failures are written down, and warnings are kept apart."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.comparison.folds import Split
from knowable.comparison.methods import Candidate
from knowable.comparison.problem import ModelProblem
from knowable.comparison.run import Conditions, attempt, fit_seed, one_line
from knowable.core.method import Method
from knowable.errors import Interrupted, KnowableWarning
from tests.comparison.cases import class_problem, linear_problem

SPLIT = Split(np.arange(30), np.arange(30, 40))
EXACT = Candidate("exact", kn.ExactLinear())


def conditions(outside=None, problem=linear_problem) -> Conditions:
    problem = ModelProblem(*problem())
    return Conditions(problem, 0, 64, None if outside is None else problem.outside(outside))


class Broken(Method):
    """A method that fails, warns or is interrupted."""

    def __init__(self, does):
        self.does = does

    def __repr__(self) -> str:
        return "Broken()"

    def _fit(self, job):
        self.does()
        return kn.ExactLinear().fit(job.model, job.rows, seed=job.seed)


def broken(does) -> Candidate:
    return Candidate("broken", Broken(does))


def test_scores_are_those_of_a_fit_made_by_hand():
    model, (x, y) = linear_problem()
    record = attempt(conditions(), EXACT, 2, SPLIT).record
    by_hand = kn.ExactLinear().fit(model, (x[:30], y[:30]), seed=fit_seed(0, 2))
    expected = kn.evaluate(by_hand.predict(x[30:], samples=64), y[30:])
    for name in ("nll", "rmse", "crps", "coverage_90", "interval_width_90", "ece"):
        assert record.scores[name] == pytest.approx(expected[name], rel=1e-5), name
    assert (record.method, record.settings, record.fold, record.error) == ("exact", "ExactLinear()", 2, None)
    assert record.scores["seconds"] > 0 and record.scores["predict_seconds"] > 0
    assert "auroc_outside" not in record.scores and "reference_distance" not in record.scores


def test_classes_have_accuracy_and_brier_instead():
    record = attempt(conditions(problem=class_problem), Candidate("map", kn.MAP(epochs=50)), 0, SPLIT).record
    assert record.error is None
    assert record.scores.keys() >= {"nll", "accuracy", "brier", "ece", "mean_entropy"}
    assert "crps" not in record.scores and "rmse" not in record.scores


def test_rows_from_outside_are_told_by_their_uncertainty():
    far = torch.full((20, 2), 50.0)
    record = attempt(conditions(far), EXACT, 0, SPLIT).record
    assert record.scores["auroc_outside"] == 1.0  # the exact predictive variance grows with the distance


def test_the_reference_is_at_no_distance_from_itself_and_a_point_is_without_spread():
    setting = conditions()
    truth = attempt(setting, EXACT, 0, SPLIT).fitted
    record = attempt(setting, EXACT, 0, SPLIT, reference="ExactLinear()", truth=truth).record
    assert record.agreement["mean_shift"] == pytest.approx(0.0, abs=1e-6)
    assert record.scores["reference_distance"] == record.agreement["wasserstein"]
    point = attempt(
        setting, Candidate("map", kn.MAP(epochs=5)), 0, SPLIT, reference="ExactLinear()", truth=truth
    ).record
    assert point.agreement["sd_ratio"] == 0.0 and point.reference == "ExactLinear()"


def test_a_reference_without_spread_is_noted_and_the_scores_stay():
    setting = conditions()
    truth = attempt(setting, Candidate("map", kn.MAP(epochs=5)), 0, SPLIT).fitted
    record = attempt(setting, EXACT, 0, SPLIT, truth=truth).record
    assert record.agreement == {} and "nll" in record.scores and record.error is None
    assert any("Not compared with the reference" in text for text in record.warnings)


def test_a_failure_is_written_down_in_one_line():
    def fail():
        raise ValueError("first line\nsecond line")

    outcome = attempt(conditions(), broken(fail), 1, SPLIT)
    assert outcome.record.error == "ValueError: first line second line" and outcome.fitted is None
    assert outcome.record.scores == {} and one_line(RuntimeError()) == "RuntimeError"


def test_the_librarys_warnings_are_kept_once_each_and_others_are_passed_on():
    def warn():
        for _ in range(2):
            warnings.warn("slow", KnowableWarning, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    with pytest.warns(DeprecationWarning, match="old"):
        record = attempt(conditions(), broken(warn), 0, SPLIT).record
    assert record.warnings == ("slow",) and record.error is None


def test_an_interrupt_ends_the_comparison_and_not_only_the_fit():
    def interrupted():
        warnings.warn("stopped from the keyboard", Interrupted, stacklevel=1)

    with pytest.raises(KeyboardInterrupt):
        attempt(conditions(), broken(interrupted), 0, SPLIT)


def test_a_fit_leaves_the_callers_randomness_alone_and_does_not_depend_on_it():
    torch.manual_seed(1)
    first = attempt(conditions(), Candidate("mfvi", kn.MeanFieldVI(epochs=3)), 0, SPLIT).record
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    second = attempt(conditions(), Candidate("mfvi", kn.MeanFieldVI(epochs=3)), 0, SPLIT).record
    timed = ("seconds", "predict_seconds", "memory_mb")
    assert all(second.scores[name] == value for name, value in first.scores.items() if name not in timed)


def test_seeds_are_small_enough_for_scikit_learn_and_differ_between_folds():
    seeds = {fit_seed(seed, fold) for seed in range(20) for fold in range(20)}
    assert len(seeds) == 400 and all(0 <= seed < 2**31 for seed in seeds)


def test_memory_is_measured_or_left_out_but_never_missing_as_nan():
    record = attempt(conditions(), EXACT, 0, SPLIT).record
    assert not math.isnan(record.scores.get("memory_mb", 0.0))
