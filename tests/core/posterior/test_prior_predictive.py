"""Tests of the prior as a posterior given no data."""

from __future__ import annotations

import math

import torch

import knowable as kn
from knowable.core.posterior.particles import prior_posterior
from tests.core.cases import diagonal_posterior, linear_model, same_params


def test_the_atoms_are_draws_from_the_prior(generator):
    # n = 3 K values of scale 2: their mean errs by 2 / sqrt(n), their sd by 2 / sqrt(2 n); 5 of those
    draws = 5_000
    posterior = prior_posterior(linear_model(prior=kn.Normal(2.0)), draws, generator=generator)
    values = torch.cat([posterior.stack["weight"].flatten(), posterior.stack["bias"].flatten()])
    assert len(posterior) == draws
    assert abs(values.mean()) < 5 * 2 / math.sqrt(len(values))
    assert abs(values.std() - 2.0) < 5 * 2 / math.sqrt(2 * len(values))
    assert posterior.weights.unique().numel() == 1


def test_parameters_that_are_not_random_stay_at_their_start(generator):
    model = linear_model(noise=None, random="weight")
    posterior = prior_posterior(model, 3, generator=generator)
    start = model.params()
    assert same_params(posterior.points, {name: start[name] for name in ("bias", "likelihood.log_noise")})


def test_hyperparameters_stay_at_their_start(generator):
    model = linear_model(prior=kn.EmpiricalBayes(kn.Normal(0.01)))
    posterior = prior_posterior(model, 200, generator=generator)
    assert list(posterior.points) == ["prior.*.log_scale"]
    assert posterior.stack["weight"].abs().max() < 0.06  # six of its scale


def test_a_posterior_as_prior_is_drawn_from(generator):
    first = diagonal_posterior(linear_model(), generator)
    posterior = prior_posterior(linear_model(prior=first), 4_000, generator=generator)
    error = first.scale["weight"] / math.sqrt(4_000)
    assert ((posterior.mean()["weight"] - first.loc["weight"]).abs() < 5 * error).all()


def test_draws_repeat_with_their_generator():
    model = linear_model()
    first, second = (prior_posterior(model, 3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert same_params(first.stack, second.stack)
