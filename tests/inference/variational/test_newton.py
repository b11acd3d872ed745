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
from knowable.inference.variational.method import final_elbo
from knowable.inference.variational.newton import possible_rise, refine
from knowable.inference.variational.structured import lower_factor
from knowable.testing import LinearGaussian
from tests.inference.variational.family_oracle import best_low_rank, dense_moments, normal_divergence

FAMILIES = [kn.MeanFieldVI, kn.NaturalVI, kn.MomentVI, kn.FullRankVI, kn.LowRankVI, kn.MatrixNormalVI, kn.FlowVI]
METHODS = [*FAMILIES, kn.MixtureVI]
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
    """KL of the best member of a family."""
    precision, every = problem.precision, torch.arange(len(problem.precision))
    if method in (kn.FullRankVI, kn.FlowVI):
        return 0.0
    if method is kn.LowRankVI:
        return best_low_rank(precision, 4)
    if method is kn.MatrixNormalVI:  # one row of weights, and the bias
        return independent(precision, [every[:-1], every[-1:]])
    return independent(precision, list(every.split(1)))


def divergence(problem: LinearGaussian, posterior: kn.Posterior) -> tuple[float, float]:
    """KL from a fit to the posterior, and its standard error: in closed form, or from the ELBO.

    Of a mixture the mean over its components, which is what training minimises.
    """
    if isinstance(posterior, kn.Mixture):
        each = [divergence(problem, member)[0] for member in posterior.members]
        return sum(each) / len(each), 0.0
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
    # a normal target: one step is exact. 0.5 nats for valleys of low-rank normals
    problem = LinearGaussian.make(rows, weights - 1, noise=noise, seed=seed)
    objective = start_of(problem, method)
    assert refine(objective, rows_of(problem), seed) >= 1
    posterior = objective.posterior(log_evidence=final_elbo(objective, rows_of(problem), seed)[0])
    found, error = divergence(problem, posterior)
    assert found < least_divergence(problem, method) + 0.5 + 4 * error


@pytest.mark.parametrize("number", range(2))
def test_newton_steps_leave_a_valley_from_which_few_draws_do_not_tell_the_way(number):
    # the best member with one direction less lacks a nat or two, which the mean of 64 draws knows to 0.8
    problem = LinearGaussian.make(20, 39, noise=1.0, seed=number)
    objective = start_of(problem, kn.LowRankVI)
    (part,) = objective.parts
    log_scale, factor = nearest_low_rank(problem.precision, 3)
    with torch.no_grad():
        objective.fit_normal(problem.mean, problem.precision)
        best = divergence(problem, objective.posterior())[0]
        part.log_scale.copy_(log_scale)
        part.factor.copy_(torch.cat([factor, torch.zeros_like(factor[:1])]))
    refine(objective, rows_of(problem), number)
    assert divergence(problem, objective.posterior())[0] < best + 0.5


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


@pytest.mark.parametrize("method", [kn.FullRankVI, kn.FlowVI])
def test_check_sees_correlations_that_are_missing(seed, method):
    # at the best independent normals no slope is left along any weight
    problem = LinearGaussian.make(20, 39, noise=1.0, seed=seed)
    objective, data = start_of(problem, method), rows_of(problem)
    with torch.no_grad():
        objective.fit_normal(problem.mean, problem.precision.diagonal().diag())
    missing = problem.divergence(problem.mean, problem.mean_field_std)
    rise = possible_rise(objective, data, seed, 5000)
    assert not rise.is_small and 0.5 * missing < rise.nats < missing + 4 * rise.standard_error
    with torch.no_grad():
        objective.fit_normal(problem.mean, problem.precision)
    assert possible_rise(objective, data, seed, 5000).is_small


def test_fit_that_could_rise_says_so(monkeypatch):
    problem = LinearGaussian.make(30, 4, noise=0.001, seed=0)
    posterior = kn.MeanFieldVI(epochs=100).fit(problem.model(), problem.data)
    assert posterior.diagnostics.converged is False and posterior.diagnostics["possible_rise"] > 10
    assert "could still rise" in posterior.diagnostics.message
    monkeypatch.setattr("knowable.inference.variational.method.refine", lambda *_, **__: 0)
    monkeypatch.setattr("knowable.core.training.schedule._LONGEST", 1_000)
    monkeypatch.setattr("knowable.core.training.schedule._SHORTEST_FALL", 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kn.MeanFieldVI().fit(problem.model(), problem.data)
    said = [str(each.message) for each in caught if issubclass(each.category, ConvergenceWarning)]
    assert any("could still rise by about" in text for text in said)


def test_check_of_a_method_without_sampling_is_exact(seed):
    problem = LinearGaussian.make(4000, 6, noise=0.3, correlation=0.0, seed=seed)
    objective = start_of(problem, kn.MomentVI)
    std = problem.mean_field_std
    with torch.no_grad():
        objective.fit_normal(problem.mean + 0.5 * std, problem.precision.diagonal().diag() / 4.0)
    rise = possible_rise(objective, rows_of(problem), seed, epochs=0)
    missing = problem.divergence(problem.mean + 0.5 * std, 2.0 * std) - problem.divergence(problem.mean, std)
    assert rise.standard_error == 0.0
    assert rise.nats == pytest.approx(missing, rel=0.2)  # features are nearly independent


@pytest.mark.parametrize("method", [kn.MeanFieldVI, kn.MixtureVI])
def test_point_estimates_that_components_share_stay_as_they_are(method):
    problem = LinearGaussian.make(30, 4, noise=0.01, seed=0)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), random="weight")  # the bias is a point estimate
    components = [method(epochs=2).objective(model, problem.x, 30) for _ in range(2)]
    before = components[0].point_params()["bias"].detach().clone()
    assert refine(components[0], as_data(problem.data, model), 0, hold_points=True) >= 1
    assert torch.equal(components[0].point_params()["bias"], before)
    assert refine(components[1], as_data(problem.data, model), 0) >= 1
    assert not torch.equal(components[1].point_params()["bias"], before)


def test_check_covers_networks_that_are_too_large_for_newton_steps():
    problem = LinearGaussian.make(30, 400, noise=0.001, seed=0)
    found = kn.MeanFieldVI(epochs=50).fit(problem.model(), problem.data).diagnostics
    assert found["possible_rise"] > 10 and found.converged is False and "could still rise" in found.message


def test_fit_that_cannot_be_checked_says_why():
    x = torch.linspace(-1, 1, 40).unsqueeze(1)
    net = torch.nn.Sequential(torch.nn.Linear(1, 5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 1))
    found = kn.MeanFieldVI(epochs=20).fit(kn.Model(net, kn.Gaussian(0.1)), (x, 2 * x)).diagnostics
    assert "possible_rise" not in found.terms
    assert "was not checked: the network computes something else in training" in found.message


def test_short_fit_of_a_large_network_is_not_checked_and_says_so(monkeypatch):
    monkeypatch.setattr("knowable.inference.variational.newton.LITTLE_WORK", 0)
    problem = LinearGaussian.make(30, 4, noise=0.1, seed=0)
    found = kn.MeanFieldVI(epochs=3).fit(problem.model(), problem.data).diagnostics
    assert "possible_rise" not in found.terms
    assert "was not checked: so short a training is not worth its cost" in found.message
    longer = kn.MeanFieldVI(epochs=400).fit(problem.model(), problem.data).diagnostics  # 12,000 rows
    assert "possible_rise" in longer.terms


# --- whole fits ------------------------------------------------------------------------------------------------------


def check_fit(method: type, problem: LinearGaussian, seed: int) -> None:
    """Half a nat from the optimum, or a warning that says at least half of what is missing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method().fit(problem.model(seed=seed), problem.data, seed=seed)
    found, error = divergence(problem, posterior)
    missing = found - least_divergence(problem, method)
    said = any("could still rise" in str(each.message) for each in caught)
    rise = posterior.diagnostics["possible_rise"]
    assert missing < 0.5 + 3 * error or (said and rise > 0.5 * missing), (missing, error, said, rise)


@pytest.mark.parametrize("method", METHODS)
def test_short_fits_reach_the_optimum_or_say_how_far_it_is(monkeypatch, method):
    monkeypatch.setattr("knowable.core.training.schedule._LONGEST", 200)
    monkeypatch.setattr("knowable.core.training.schedule._SHORTEST_FALL", 100)
    check_fit(method, LinearGaussian.make(30, 4, noise=0.001, seed=0), 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("weights", "rows", "noise", "number"),
    [(5, 30, 1.0, 0), (5, 30, 0.01, 1), (40, 20, 1.0, 1), (40, 20, 0.1, 0), (40, 20, 0.001, 1)],
)
def test_default_fits_reach_the_optimum_or_say_how_far_it_is(method, weights, rows, noise, number):
    check_fit(method, LinearGaussian.make(rows, weights - 1, noise=noise, seed=number), number)


def test_targets_that_are_not_standardised_are_fitted_quickly_and_with_a_warning():
    x = torch.randn((60, 3), generator=torch.Generator().manual_seed(0))
    y = 1e4 * x.sum(1, keepdim=True) + 1e6
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    with pytest.warns(kn.ModelWarning, match="Standardise x and y"):
        found = kn.MeanFieldVI(epochs=400, learning_rate=0.05).fit(kn.Model(net, kn.Gaussian()), (x, y))
    # under N(0, 1) priors for the weights, noise of the size of the targets explains them best
    assert found.diagnostics["log_noise"] == pytest.approx(y.square().mean().sqrt().log().item(), abs=0.3)
    assert found.diagnostics["possible_rise"] < 2.0
