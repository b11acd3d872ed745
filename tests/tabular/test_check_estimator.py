"""Both estimators pass scikit-learn's own checks, all of them, with methods of every family."""

from __future__ import annotations

import pytest

from tests.tabular.cases import QUICK
from tests.tabular.every_check import outcomes_of

METHODS = (*QUICK, "own network")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cls_name", ["BayesianRegressor", "BayesianClassifier"])
def test_every_check_of_scikit_learn_passes(cls_name: str, method: str):
    outcomes = outcomes_of(cls_name, method)
    assert len(outcomes) > 40
    assert {name: what for name, what in outcomes.items() if what != "passed"} == {}
