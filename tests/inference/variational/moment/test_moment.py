"""Tests of inference by moments: exact on linear models, near the truth of the network on others."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.testing import LinearGaussian
from tests.inference.variational.logistic import Logistic
from tests.inference.variational.monte_carlo import output_moments
from tests.inference.variational.oracle import flat_moments

QUICK = {"epochs": 800, "learning_rate": 0.03}


@functools.cache
def fitted(seed: int) -> tuple[LinearGaussian, kn.MomentNormal]:
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    return problem, kn.MomentVI(**QUICK).fit(problem.model(), problem.data, seed=seed)


def test_linear_model_has_the_closed_form_optimum(seed):
    # no noise in the gradient: what is left is what Adam leaves
    problem, posterior = fitted(seed)
    loc, std = flat_moments(problem, posterior)
    torch.testing.assert_close(loc, problem.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(std, problem.mean_field_std, rtol=1e-3, atol=0)


def test_reported_bound_is_that_of_the_fitted_normals(seed):
    problem, posterior = fitted(seed)
    exact = problem.elbo(*flat_moments(problem, posterior))
    assert abs(posterior.log_evidence - exact) < 4 * posterior.log_evidence.standard_error
    assert posterior.log_evidence.kind == "bound"


def test_prediction_is_that_of_the_fitted_normals(seed):
    problem, posterior = fitted(seed)
    loc, std = flat_moments(problem, posterior)
    prediction = posterior.predict(problem.x)
    variance = problem.design.square() @ std.square() + problem.noise**2
    torch.testing.assert_close(prediction.mean[:, 0], problem.design @ loc)
    torch.testing.assert_close(prediction.variance[:, 0], variance)


def test_tempered_fit_reaches_the_tempered_optimum(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    posterior = kn.MomentVI(**QUICK, beta=0.3).fit(problem.model(), problem.data, seed=seed)
    _, std = flat_moments(problem, posterior)
    torch.testing.assert_close(std, problem.tempered(0.3).mean_field_std, rtol=1e-3, atol=0)


def test_logistic_regression_has_the_optimum_that_quadrature_finds(seed):
    problem = Logistic.make(n=60, seed=seed)
    posterior = kn.MomentVI(**QUICK).fit(problem.model(), problem.data, seed=seed)
    best = problem.optimum()
    for found, expected in zip((posterior.loc, posterior.scale), best, strict=True):
        torch.testing.assert_close(torch.cat([found["weight"][0], found["bias"]]), expected, rtol=5e-3, atol=5e-3)


def test_fitted_network_of_three_layers_has_the_moments_of_its_draws_within_five_per_cent(seed, generator):
    torch.manual_seed(seed)
    x, y = kn.datasets.sine_with_gap(n=60, seed=seed)
    net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
    posterior = kn.MomentVI(epochs=400).fit(kn.Model(net, kn.Gaussian(0.2)), (x, y), seed=seed)
    where = torch.linspace(-2.5, 2.5, 6).unsqueeze(1)
    found = posterior.predict(where)
    mean, std = output_moments(posterior, where, generator)
    assert ((found.mean - mean).abs() < 0.1 * std).all()
    torch.testing.assert_close(found.epistemic.sqrt().double(), std, rtol=0.05, atol=0)


def test_labels_are_learned(seed):
    torch.manual_seed(seed)
    x, y = kn.datasets.two_moons(n=100, seed=seed)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    posterior = kn.MomentVI(epochs=500, learning_rate=0.02).fit(kn.Model(net, kn.Categorical()), (x, y), seed=seed)
    assert (posterior.predict(x).labels == y).float().mean() > 0.85


def test_prediction_may_sample(seed):
    problem = LinearGaussian.make(n=30, seed=seed)
    posterior = kn.MomentVI(epochs=5, prediction="sampling").fit(problem.model(), problem.data)
    assert posterior.prediction == "sampling"
    samples = posterior.predict(problem.x[:1].repeat(2, 1), samples=10).samples
    assert torch.equal(samples[:, 0], samples[:, 1])


def test_full_batches_do_not_depend_on_the_seed():
    problem = LinearGaussian.make(n=30)
    one, two = (kn.MomentVI(epochs=20).fit(problem.model(), problem.data, seed=seed) for seed in (1, 2))
    assert all(torch.equal(one.loc[name], two.loc[name]) for name in one.loc)


def test_layers_and_likelihoods_without_a_rule_are_refused_by_name():
    data = torch.randn(8, 3), torch.randn(8, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    with pytest.raises(kn.Unsupported, match="LayerNorm '1'"):
        kn.MomentVI(epochs=1).fit(kn.Model(net, kn.Gaussian()), data)

    @dataclass(frozen=True)
    class Absolute(kn.core.likelihood.Likelihood):
        def check_target(self, y, output, *, name="y"):
            return y

        def log_prob(self, output, y, params):
            return -(output - y).abs().sum(1)

        def predict(self, outputs, params, log_weights):
            raise NotImplementedError

    with pytest.raises(kn.Unsupported, match="Absolute"):
        kn.MomentVI(epochs=1).fit(kn.Model(nn.Linear(3, 1), Absolute()), data)


@pytest.mark.parametrize("knobs", [{"covariance_limit": -1}, {"prediction": "guessing"}], ids=str)
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises(kn.InvalidArgument, match=next(iter(knobs))):
        kn.MomentVI(**knobs)
