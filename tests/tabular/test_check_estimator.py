"""Both estimators pass scikit-learn's own checks, all of them, with methods of every family."""

from __future__ import annotations

import warnings

import pytest
from sklearn.utils.estimator_checks import check_estimator

import knowable as kn
from tests.tabular.cases import QUICK, small_network


@pytest.mark.parametrize("method", QUICK)
@pytest.mark.parametrize("cls", [kn.BayesianRegressor, kn.BayesianClassifier], ids=["regressor", "classifier"])
def test_every_check_of_scikit_learn_passes(cls: type, method: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)  # of chains that are too short, on purpose
        results = check_estimator(cls(QUICK[method], network=small_network, samples=16), on_fail="raise", on_skip=None)
    outcomes = {each["check_name"]: each["status"] for each in results}
    assert len(outcomes) > 40
    assert {name: status for name, status in outcomes.items() if status != "passed"} == {}


@pytest.mark.slow
@pytest.mark.parametrize("cls", [kn.BayesianRegressor, kn.BayesianClassifier], ids=["regressor", "classifier"])
def test_every_check_of_scikit_learn_passes_as_they_come(cls: type):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        results = check_estimator(cls(budget=None, method="map"), on_fail="raise", on_skip=None)
    assert {each["status"] for each in results} == {"passed"}
