"""A model with its data: rows by position, an exact fit, and an identity that notices what changed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.comparison.problem import ModelProblem
from knowable.errors import InvalidData, Unsupported
from tests.comparison.cases import linear_problem


def test_rows_are_those_of_the_data():
    model, (x, y) = linear_problem()
    problem = ModelProblem(model, (x, y))
    index = np.array([3, 1, 7])
    assert problem.rows == 40 and torch.equal(problem.inputs(index), x[[3, 1, 7]])
    assert torch.equal(problem.outcomes(index).flatten(), y[[3, 1, 7]])


def test_a_fit_is_that_of_the_method_on_those_rows():
    model, (x, y) = linear_problem()
    index = np.arange(0, 40, 2)
    fitted = ModelProblem(model, (x, y)).fit(kn.ExactLinear(), index, seed=3, seconds=None)
    expected = kn.ExactLinear().fit(model, (x[::2], y[::2]), seed=3).predict(x)
    torch.testing.assert_close(fitted.predict(x, samples=64).mean.flatten(), expected.mean)
    assert fitted.diagnostics.method.startswith("ExactLinear")


def test_a_limit_of_time_cuts_a_long_fit_short():
    model, data = linear_problem()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.ConvergenceWarning)  # it has not settled
        fitted = ModelProblem(model, data).fit(kn.MAP(epochs=10**7), np.arange(40), seed=0, seconds=0.3)
    assert fitted.diagnostics.seconds < 5.0


def test_its_size_is_the_number_of_random_parameters():
    model, data = linear_problem()
    assert ModelProblem(model, data).parameters() == 3
    half = kn.Model(model.net, kn.Gaussian(0.3), random="weight")
    assert ModelProblem(half, data).parameters() == 2


def test_identity_notices_other_weights_other_data_and_another_prior():
    model, (x, y) = linear_problem()
    first = ModelProblem(model, (x, y)).identity()
    assert ModelProblem(model, (x.clone(), y.clone())).identity() == first
    moved = x.clone()
    moved[17, 1] += 1e-6
    assert ModelProblem(model, (moved, y)).identity()["data"] != first["data"]
    torch.manual_seed(5)
    other = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.3))
    assert ModelProblem(other, (x, y)).identity()["start"] != first["start"]
    wide = kn.Model(model.net, kn.Gaussian(noise=0.3), kn.Normal(10.0))
    assert ModelProblem(wide, (x, y)).identity()["model"] != first["model"]


def test_data_that_cannot_be_used_is_refused_before_any_fit():
    model, (x, y) = linear_problem()
    with pytest.raises(InvalidData, match="same number of rows"):
        ModelProblem(model, (x, y[:-1]))
    with pytest.raises(Unsupported, match="data has row weights, which a comparison does not support"):
        ModelProblem(model, kn.Data((x, y), size=40, weights=torch.ones(40)))
    with pytest.raises(InvalidData, match="outside has 1 missing"):
        ModelProblem(model, (x, y)).outside(torch.full((1, 1), torch.nan))
