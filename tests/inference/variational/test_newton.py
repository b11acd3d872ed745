"""Tests of the check at the end of a fit, and of the Newton steps that raise the ELBO."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout
from knowable.errors import ConvergenceWarning
from knowable.inference.variational.low_rank import nearest_low_rank
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.newton import possible_rise, refine
from knowable.inference.variational.structured import lower_factor
from knowable.testing import LinearGaussian
from tests.inference.variational.family_oracle import best_low_rank, dense_moments, normal_divergence

NORMAL = [kn.MeanFieldVI, kn.NaturalVI, kn.FullRankVI, kn.LowRankVI, kn.MatrixNormalVI]
FAMILIES = [*NORMAL, kn.FlowVI]
SIZES = pytest.mark.parametrize(("weights", "rows"), [(5, 30), (40, 20)])


def start_of(problem: LinearGaussian, method: type):
    return method().objective(problem.model(), problem.x, len(problem.x))


def rows_of(problem: LinearGaussian):
    return as_data(problem.data, problem.model())


def independent(precision: Tensor, blocks: list[Tensor]) -> float:
    """Divergence of the product of normals that is best, one for each block: their precisions are the blocks'."""
    covariance = torch.zeros_like(precision)
    for block in blocks:
        covariance[block.unsqueeze(1), block] = torch.linalg.inv(precision[block][:, block])
    return normal_divergence(torch.zeros(len(precision)), covariance, torch.zeros(len(precision)), precision)


def least_divergence(problem: LinearGaussian, method: type) -> float:
    """KL of the best member of a family; of a flow at most that of mean field, where it begins."""
    precision, every = problem.precision, torch.arange(len(problem.precision))
    if method is kn.FullRankVI:
        return 0.0
    if method is kn.LowRankVI:
        return best_low_rank(precision, 4)
    if method is kn.MatrixNormalVI:  # one row of weights, and the bias
        return independent(precision, [every[:-1], every[-1:]])
    return independent(precision, list(every.split(1)))


def divergence(problem: LinearGaussian, posterior: kn.Posterior) -> tuple[float, float]:
    """KL from a fit to the posterior, and its standard error: in closed form, or from the ELBO."""
    if isinstance(posterior, kn.FlowPosterior):
        assert posterior.log_evidence is not None
        return problem.log_evidence - posterior.log_evidence, posterior.log_evidence.standard_error
    loc, covariance = dense_moments(posterior, Layout.of(problem.model().params()))
    return normal_divergence(loc, covariance, problem.mean, problem.precision), 0.0


# --- Newton steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FAMILIES)
@pytest.mark.parametrize("noise", [1.0, 0.001])
@SIZES
def test_newton_steps_reach_the_optimum_of_the_family_from_any_start(seed, method, noise, weights, rows):
    # a normal target: one step is exact. 0.5 nats for valleys of low-rank normals, and fixed draws of flows
    problem = LinearGaussian.make(rows, weights - 1, noise=noise, seed=seed)
    objective = start_of(problem, method)
    assert refine(objective, rows_of(problem), seed) >= 1
    if method is kn.FlowVI:
        found, error = problem.log_evidence - elbo_of(objective, problem), 0.5
    else:
        found, error = divergence(problem, objective.posterior())
    assert found < least_divergence(problem, method) + 0.5 + 4 * error


def elbo_of(objective, problem: LinearGaussian) -> float:
    from knowable.inference.variational.method import final_elbo

    return final_elbo(objective, rows_of(problem), 0)[1]["elbo"]


def test_newton_steps_do_nothing_at_the_optimum(seed):
    problem = LinearGaussian.make(30, 4, noise=0.1, seed=seed)
    objective = start_of(problem, kn.FullRankVI)
    with torch.no_grad():
        objective.fit_normal(torch.cat([problem.mean]), problem.precision)
    before = {name: value.clone() for name, value in objective.tensors().items()}
    assert refine(objective, rows_of(problem), seed) == 0
    after = objective.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_many_weights_have_no_newton_steps():
    problem = LinearGaussian.make(20, 400, seed=0)
    assert refine(start_of(problem, kn.MeanFieldVI), rows_of(problem), 0) == 0


def test_nearest_low_rank_normal_is_that_of_a_search(seed):
    precision = LinearGaussian.make(30, 7, noise=0.5, seed=seed).precision
    log_scale, factor = nearest_low_rank(precision, 2)
    half = log_scale.exp() * torch.cat([torch.eye(8, dtype=torch.float64), factor])
    found = normal_divergence(torch.zeros(8), half.T @ half, torch.zeros(8), precision)
    assert found < best_low_rank(precision, 2) + 0.5  # there are several valleys


def test_lower_factor_is_the_root_of_the_covariance(seed):
    precision = LinearGaussian.make(30, 7, noise=0.5, seed=seed).precision
    factor = lower_factor(precision)
    torch.testing.assert_close(factor, factor.tril())
    torch.testing.assert_close(factor @ factor.T, torch.linalg.inv(precision))


# --- the check -------------------------------------------------------------------------------------------------------


def at_means_and_scales(problem: LinearGaussian, shift: float, stretch: float) -> MeanFieldObjective:
    objective = start_of(problem, kn.MeanFieldVI)
    precision = problem.precision.diagonal().diag()
    std = problem.mean_field_std
    with torch.no_grad():
        objective.fit_normal(problem.mean + shift * std, precision / stretch**2)
    return objective


@pytest.mark.parametrize(("shift", "stretch"), [(0.0, 1.0), (0.5, 1.0), (0.0, 3.0), (0.0, 0.5), (1.0, 1.5)])
def test_possible_rise_is_what_is_missing(seed, shift, stretch):
    # independent features: what is missing is exact, by the divergence in closed form
    problem = LinearGaussian.make(4000, 6, noise=0.3, correlation=0.0, seed=seed)
    objective = at_means_and_scales(problem, shift, stretch)
    rise = possible_rise(objective, rows_of(problem), seed, epochs=2000)
    std = problem.mean_field_std
    missing = problem.divergence(problem.mean + shift * std, stretch * std) - problem.divergence(problem.mean, std)
    assert abs(rise.nats - missing) < 5 * rise.standard_error + 0.2 * missing + 0.01  # features are nearly independent


@pytest.mark.parametrize("noise", [1.0, 0.001])
@SIZES
def test_check_passes_at_the_optimum_and_fails_away_from_it(seed, noise, weights, rows):
    problem = LinearGaussian.make(rows, weights - 1, noise=noise, seed=seed)
    data = rows_of(problem)
    assert possible_rise(at_means_and_scales(problem, 0.0, 1.0), data, seed, 4000).is_small
    assert not possible_rise(at_means_and_scales(problem, 0.0, 3.0), data, seed, 4000).is_small
    assert not possible_rise(at_means_and_scales(problem, 2.0, 1.0), data, seed, 4000).is_small


def test_fit_that_could_rise_says_so(monkeypatch):
    problem = LinearGaussian.make(30, 4, noise=0.001, seed=0)
    posterior = kn.MeanFieldVI(epochs=100).fit(problem.model(), problem.data)
    assert posterior.diagnostics.converged is False and posterior.diagnostics["possible_rise"] > 10
    assert "could still rise" in posterior.diagnostics.message
    monkeypatch.setattr("knowable.inference.variational.method.refine", lambda *_: 0)
    monkeypatch.setattr("knowable.core.training.schedule._LONGEST", 1_000)
    monkeypatch.setattr("knowable.core.training.schedule._SHORTEST_FALL", 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kn.MeanFieldVI().fit(problem.model(), problem.data)
    said = [str(each.message) for each in caught if issubclass(each.category, ConvergenceWarning)]
    assert any("could still rise by about" in text for text in said)


# --- whole fits ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("noise", [1.0, 0.1, 0.01, 0.001])
@pytest.mark.parametrize("method", FAMILIES)
@SIZES
def test_default_fits_reach_the_optimum_or_say_how_far_it_is(number, noise, method, weights, rows):
    problem = LinearGaussian.make(rows, weights - 1, noise=noise, seed=number)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method().fit(problem.model(seed=number), problem.data, seed=number)
    found, error = divergence(problem, posterior)
    missing = found - least_divergence(problem, method)
    said = [str(each.message) for each in caught if issubclass(each.category, ConvergenceWarning)]
    print(f"{method.__name__:<16}{weights:>4}{noise:>8g}{number:>4}{missing:>10.3f}  {' '.join(said)}")
    assert missing < 0.5 + 3 * error or any("could still rise" in text for text in said)
