"""Both estimators pass scikit-learn's own checks, all of them, with methods of every family."""

from __future__ import annotations

import pytest

from tests.tabular.cases import QUICK
from tests.tabular.every_check import outcomes_of

# every method with one of the two, and both with a network of their own
CLASSES = ("BayesianRegressor", "BayesianClassifier")
PAIRS = [*zip(CLASSES * len(QUICK), QUICK, strict=False), *((cls_name, "own network") for cls_name in CLASSES)]


@pytest.mark.slow
@pytest.mark.parametrize(("cls_name", "method"), PAIRS)
def test_every_check_of_scikit_learn_passes(cls_name: str, method: str):
    outcomes = outcomes_of(cls_name, method)
    assert len(outcomes) > 40
    assert {name: what for name, what in outcomes.items() if what != "passed"} == {}
