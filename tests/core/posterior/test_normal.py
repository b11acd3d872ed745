"""Tests of the Gaussian posteriors; torch.distributions is the oracle."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.core.network.params import Layout
from tests.core.cases import DTYPE, diagonal_posterior, full_posterior, linear_model, same_params


def _flat(posterior: kn.FullNormal, draws: dict[str, torch.Tensor]) -> torch.Tensor:
    return posterior.layout.flatten(draws)


def test_the_log_density_of_a_diagonal_normal_is_that_of_torch(generator):
    posterior = diagonal_posterior(linear_model(noise=None), generator)
    draws = posterior.sample(5, generator)
    expected = sum(
        torch.distributions.Normal(posterior.loc[name], posterior.scale[name]).log_prob(draws[name]).flatten(1).sum(1)
        if draws[name].dim() > 1
        else torch.distributions.Normal(posterior.loc[name], posterior.scale[name]).log_prob(draws[name])
        for name in draws
    )
    torch.testing.assert_close(posterior.log_prob(draws), expected)
    one = {name: value[2] for name, value in draws.items()}
    torch.testing.assert_close(posterior.log_prob(one), expected[2])


def test_the_log_density_of_a_full_normal_is_that_of_torch(generator):
    posterior = full_posterior(linear_model(noise=None), generator)
    draws = posterior.sample(5, generator)
    oracle = torch.distributions.MultivariateNormal(posterior.loc, posterior.covariance)
    expected = oracle.log_prob(_flat(posterior, draws))
    torch.testing.assert_close(posterior.log_prob(draws), expected)
    torch.testing.assert_close(posterior.log_prob({name: value[2] for name, value in draws.items()}), expected[2])


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_the_density_is_over_the_random_parameters_alone(make, generator):
    posterior = make(linear_model(random="weight"), generator)
    params = posterior.mean()
    assert torch.equal(posterior.log_prob(params), posterior.log_prob({**params, "bias": params["bias"] + 9.0}))


def test_the_covariance_of_draws_is_the_posteriors_within_its_standard_errors(generator):
    # an entry of the sample covariance of n draws errs by sqrt((S_ij^2 + S_ii S_jj) / n): 5 of those at each entry
    posterior = full_posterior(linear_model(noise=None), generator)
    n = 40_000
    draws = _flat(posterior, posterior.sample(n, generator))
    covariance = posterior.covariance
    variances = covariance.diagonal()
    error = ((covariance.square() + variances.outer(variances)) / n).sqrt()
    assert ((draws.T.cov() - covariance).abs() < 5 * error).all()
    assert ((draws.mean(0) - posterior.loc).abs() < 5 * (variances / n).sqrt()).all()


def test_draws_of_a_diagonal_normal_are_independent_with_their_scales(generator):
    posterior = diagonal_posterior(linear_model(), generator)
    n = 40_000
    layout = Layout.of(posterior.loc)
    draws, scale = layout.flatten(posterior.sample(n, generator)), layout.flatten(posterior.scale)
    standard = (draws - layout.flatten(posterior.loc)) / scale
    # correlations of independent normals err by 1 / sqrt(n), their variances by sqrt(2 / n)
    assert ((standard.T.cov() - torch.eye(3, dtype=DTYPE)).abs() < 5 * math.sqrt(2 / n)).all()


def test_the_spread_of_a_full_normal_is_the_root_of_its_covariances_diagonal(generator):
    posterior = full_posterior(linear_model(), generator)
    expected = posterior.layout.views(posterior.covariance.diagonal().sqrt())
    for name, value in posterior.std().items():
        torch.testing.assert_close(value, expected[name])


def test_a_full_normal_without_correlations_is_the_diagonal_one(generator):
    diagonal = diagonal_posterior(linear_model(), generator)
    layout = Layout.of(diagonal.loc)
    loc, scale = layout.flatten(diagonal.loc), layout.flatten(diagonal.scale)
    full = kn.FullNormal(diagonal.model, layout, loc, scale.diag())
    params = diagonal.sample(4, generator)
    torch.testing.assert_close(full.log_prob(params), diagonal.log_prob(params))
    drawn = [each.sample(4, torch.Generator().manual_seed(1)) for each in (diagonal, full)]
    for name in params:
        torch.testing.assert_close(drawn[0][name], drawn[1][name])


def test_what_is_passed_in_is_copied(generator):
    model = linear_model()
    loc = {name: torch.zeros_like(value) for name, value in model.params().items()}
    scale = {name: torch.ones_like(value) for name, value in model.params().items()}
    posterior = kn.DiagonalNormal(model, loc, scale)
    loc["weight"] += 5.0
    posterior.mean()["bias"] += 5.0
    assert same_params(posterior.mean(), {name: torch.zeros_like(value) for name, value in loc.items()})


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_a_missing_parameter_is_refused_by_name(make):
    posterior = make(linear_model())
    params = {name: value for name, value in posterior.mean().items() if name != "weight"}
    with pytest.raises(kn.InvalidArgument, match="weight"):
        posterior.log_prob(params)


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_tensors_and_back_give_the_same_posterior(make, generator):
    model = linear_model(noise=None)
    posterior = make(model, generator)
    again = type(posterior)._from_tensors(model, posterior._tensors())
    assert same_params(again.mean(), posterior.mean())
    params = posterior.sample(3, generator)
    assert torch.equal(again.log_prob(params), posterior.log_prob(params))


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_signal_to_noise_is_the_mean_in_standard_deviations(make, generator):
    posterior = make(linear_model(random="weight"), generator)
    ratio = posterior.signal_to_noise()
    assert list(ratio) == ["weight"]
    torch.testing.assert_close(ratio["weight"], posterior.mean()["weight"].abs() / posterior.std()["weight"])


def test_log_alpha_is_noise_over_signal_in_logarithms(generator):
    posterior = diagonal_posterior(linear_model(random="weight"), generator)
    found = posterior.log_alpha()
    assert list(found) == ["weight"]
    expected = (posterior.scale["weight"] ** 2 / posterior.loc["weight"] ** 2).log()
    torch.testing.assert_close(found["weight"], expected)
    torch.testing.assert_close(found["weight"], -2 * posterior.signal_to_noise()["weight"].log())
    assert posterior.log_alpha_threshold == 3.0


def test_log_alpha_of_a_mean_of_zero_is_infinite():
    model = linear_model(random="weight")
    weight = torch.zeros(1, 2, dtype=DTYPE)
    posterior = kn.DiagonalNormal(model, {"weight": weight}, {"weight": weight + 0.1}, points=model.params())
    assert posterior.log_alpha()["weight"].isposinf().all()
