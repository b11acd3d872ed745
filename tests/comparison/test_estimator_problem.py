"""Any estimator after scikit-learn's conventions: cloned, set, fitted to rows, its labels understood."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import knowable as kn
from knowable.comparison.problem import EstimatorProblem, table_fingerprint
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.errors import InvalidData, InvalidType
from tests.comparison.cases import MeanEstimator, ShareEstimator

X, Y = np.arange(20.0).reshape(10, 2), np.arange(10.0)
FRAME = pd.DataFrame({"a": range(10), "b": list("xyzxyzxyzx")})


@pytest.mark.parametrize("x", [X, X.tolist(), FRAME, torch.from_numpy(X)], ids=["array", "list", "frame", "tensor"])
def test_rows_are_taken_by_position_from_whatever_holds_them(x):
    problem = EstimatorProblem(MeanEstimator(), (x, Y))
    assert problem.rows == 10
    taken = np.asarray(problem.inputs(np.array([4, 0])))
    assert taken.tolist() == [np.asarray(x).tolist()[4], np.asarray(x).tolist()[0]]


def test_a_clone_is_fitted_with_method_seed_and_seconds():
    clones = []

    class Noted(MeanEstimator):
        def fit(self, X, y):
            clones.append(self)
            return super().fit(X, y)

    estimator = Noted(shift=1.0)
    fitted = EstimatorProblem(estimator, (X, Y)).fit("deep_ensemble", np.array([0, 1, 2]), seed=7, seconds=3.0)
    (made,) = clones
    assert (made.method, made.random_state, made.time_limit, made.shift) == ("deep_ensemble", 7, 3.0, 1.0)
    assert (estimator.method, estimator.random_state, estimator.time_limit) == ("map", None, None)
    prediction = fitted.predict(X, samples=5)
    assert prediction.mean.flatten().tolist() == pytest.approx([2.0] * 10)  # the mean of 0, 1, 2, shifted by 1


def test_an_estimator_need_not_have_a_seed_or_a_time_limit():
    labels = np.array(list("aab" * 4))
    fitted = EstimatorProblem(ShareEstimator(), (np.zeros((12, 1)), labels)).fit(
        "map", np.arange(12), seed=1, seconds=2.0
    )
    prediction = fitted.predict(np.zeros((2, 1)), samples=1)
    assert prediction.probs[0].tolist() == pytest.approx([2 / 3, 1 / 3])


def test_labels_become_their_places_among_the_classes():
    labels = np.array(list("bab" * 4))
    problem = EstimatorProblem(ShareEstimator(), (np.zeros((12, 1)), labels))
    fitted = problem.fit("map", np.arange(12), seed=0, seconds=None)
    prediction = fitted.predict(np.zeros((3, 1)), samples=1)
    assert fitted.outcomes(pd.Series(["b", "a", "b"]), prediction).tolist() == [1, 0, 1]
    with pytest.raises(InvalidData, match="the label 'c' is in the rows held out"):
        fitted.outcomes(np.array(["c", "a"]), prediction)


def test_names_are_those_the_estimator_knows_and_auto_is_its_own():
    problem = EstimatorProblem(MeanEstimator(), (X, Y))
    assert problem.resolve("mfvi") == "mean_field_vi" and problem.resolve("auto") == "auto"
    assert problem.resolve(kn.MAP()) == kn.MAP()


def test_without_a_posterior_nothing_is_known_of_the_fit_and_with_one_it_speaks():
    class Keeping(MeanEstimator):
        def fit(self, X, y):
            model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
            self.posterior_ = kn.ExactLinear().fit(model, (X.astype(np.float32), y.astype(np.float32)))
            return super().fit(X, y)

    fitted = EstimatorProblem(MeanEstimator(), (X, Y)).fit("map", np.arange(10), seed=0, seconds=None)
    assert fitted.diagnostics == Diagnostics()
    fitted = EstimatorProblem(Keeping(), (X, Y)).fit("map", np.arange(10), seed=0, seconds=None)
    assert fitted.diagnostics.method.startswith("ExactLinear")


def test_identity_notices_other_settings_and_other_data_but_not_what_the_comparison_sets():
    first = EstimatorProblem(MeanEstimator(), (FRAME, Y)).identity()
    same = EstimatorProblem(MeanEstimator(method="nuts", random_state=3, time_limit=9.0), (FRAME.copy(), Y)).identity()
    assert same == first
    assert EstimatorProblem(MeanEstimator(shift=1.0), (FRAME, Y)).identity()["estimator"] != first["estimator"]
    assert EstimatorProblem(MeanEstimator(), (FRAME, Y + 1)).identity()["data"] != first["data"]
    renamed = FRAME.rename(columns={"a": "c"})
    assert EstimatorProblem(MeanEstimator(), (renamed, Y)).identity()["data"] != first["data"]


def test_fingerprints_are_of_values_and_not_of_where_they_are():
    assert table_fingerprint(X) == table_fingerprint(X.tolist()) == table_fingerprint(torch.from_numpy(X))
    assert table_fingerprint(X) != table_fingerprint(X.reshape(4, 5))
    assert table_fingerprint(FRAME) != table_fingerprint(FRAME.iloc[::-1])


@pytest.mark.parametrize(
    ("estimator", "data", "error", "words"),
    [
        (MeanEstimator(), (X, Y[:-1]), InvalidData, "a row each"),
        (MeanEstimator(), X, InvalidType, r"must be a pair \(X, y\)"),
        (MeanEstimator(), (X,), InvalidType, r"must be a pair \(X, y\)"),
    ],
)
def test_data_that_is_no_pair_of_rows_is_refused(estimator, data, error, words):
    with pytest.raises(error, match=words):
        EstimatorProblem(estimator, data)


def test_an_estimator_without_a_method_is_refused():
    class Bare(MeanEstimator):
        def __init__(self, shift=0.0):
            self.shift = shift

    with pytest.raises(InvalidType, match="Bare has no parameter 'method'"):
        EstimatorProblem(Bare(), (X, Y))
