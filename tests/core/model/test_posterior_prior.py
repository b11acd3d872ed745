"""Tests of a fitted posterior as the prior of the next data set."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.core.network.params import Layout
from tests.core.cases import DTYPE, diagonal_posterior, full_posterior, linear_data, linear_model


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_the_density_is_the_posteriors(make, generator):
    posterior = make(linear_model(noise=None), generator)
    params = posterior.sample(1, generator)
    params = {name: value[0] for name, value in params.items()}
    torch.testing.assert_close(posterior.as_prior().log_prob(params), posterior.log_prob(params))


@pytest.mark.parametrize("make", [diagonal_posterior, full_posterior])
def test_draws_have_the_posteriors_mean_and_spread(make, generator):
    # mean of n draws: sd / sqrt(n); sd: sd / sqrt(2 n); 5 of those
    posterior = make(linear_model(), generator)
    prior, like, n = posterior.as_prior(), posterior.mean(), 4_000
    draws = [prior.sample(like, generator=generator) for _ in range(n)]
    for name, std in posterior.std().items():
        values = torch.stack([draw[name] for draw in draws])
        assert ((values.mean(0) - like[name]).abs() < 5 * std / math.sqrt(n)).all()
        assert ((values.std(0) - std).abs() < 5 * std / math.sqrt(2 * n)).all()


def test_a_diagonal_prior_factorises_and_a_full_one_does_not(generator):
    diagonal, full = (make(linear_model(), generator) for make in (diagonal_posterior, full_posterior))
    each = diagonal.as_prior().prior_of("weight")
    assert torch.equal(each.loc, diagonal.loc["weight"])
    assert torch.equal(each.scale, diagonal.scale["weight"])
    assert full.as_prior().prior_of("weight") is None


def test_the_joint_normal_is_given_in_the_order_asked_for(generator):
    posterior = full_posterior(linear_model(), generator)
    layout = Layout.of({name: posterior.mean()[name] for name in ("bias", "weight")})
    mean, precision = posterior.as_prior().joint_normal(layout)
    order = [2, 0, 1]  # weight, weight, bias becomes bias, weight, weight
    torch.testing.assert_close(mean, posterior.loc[order])
    torch.testing.assert_close(precision, posterior.covariance[order][:, order].inverse())


def test_the_divergence_from_independent_normals_is_that_of_torch(generator):
    posterior = full_posterior(linear_model(), generator)
    other = diagonal_posterior(linear_model(), generator)
    flat = [posterior.layout.flatten(each) for each in (other.loc, other.scale)]
    q = torch.distributions.MultivariateNormal(flat[0], flat[1].square().diag())
    p = torch.distributions.MultivariateNormal(posterior.loc, posterior.covariance)
    expected = torch.distributions.kl_divergence(q, p)
    torch.testing.assert_close(posterior.as_prior().joint_kl(other.loc, other.scale), expected)


def test_the_start_is_the_posteriors_mean_in_the_next_models_dtype(generator):
    posterior = diagonal_posterior(linear_model(random="weight"), generator)
    like = {name: value.float() for name, value in posterior.mean().items()}
    start = posterior.as_prior().start(like)
    assert {value.dtype for value in start.values()} == {torch.float32}
    torch.testing.assert_close(start["weight"], posterior.loc["weight"].float())
    torch.testing.assert_close(start["bias"], posterior.points["bias"].float())


def test_parameters_the_posterior_does_not_know_are_refused():
    prior = diagonal_posterior(linear_model()).as_prior()
    with pytest.raises(kn.InvalidArgument, match=r"says nothing about other\. Use the same network and likelihood"):
        prior.start({"weight": torch.zeros(1, 2), "bias": torch.zeros(1), "other": torch.zeros(1)})


def test_parameters_of_another_shape_are_refused():
    prior = diagonal_posterior(linear_model()).as_prior()
    with pytest.raises(kn.InvalidArgument, match=r"prior has shape \(1, 2\) for 'weight', the network \(1, 3\)"):
        prior.start({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)})


def test_the_printed_prior_says_how_large_it_is():
    assert repr(diagonal_posterior(linear_model()).as_prior()) == "PosteriorPrior(diagonal normal, 3 parameters)"
    assert repr(full_posterior(linear_model()).as_prior()) == "PosteriorPrior(full normal, 3 parameters)"


def test_two_halves_one_after_the_other_give_the_posterior_of_both(generator):
    # exact inference: p(w | D1, D2) = p(w | D1) as prior, then D2
    x, y = linear_data(20, generator=generator)
    model = linear_model()
    both = kn.ExactLinear().fit(model, (x, y))
    first = kn.ExactLinear().fit(model, (x[:12], y[:12]))
    second = kn.ExactLinear().fit(kn.Model(model.net, kn.Gaussian(0.1), prior=first), (x[12:], y[12:]))
    torch.testing.assert_close(second.loc, both.loc, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(second.covariance, both.covariance, rtol=1e-7, atol=1e-12)
    total = first.log_evidence + second.log_evidence
    assert total == pytest.approx(both.log_evidence, rel=1e-8)


def test_a_correlated_prior_is_conditioned_on_frozen_values_in_exact_inference(generator):
    # p(w | b) = N(m_w + S_wb / S_bb (b - m_b), S_ww - S_wb S_bw / S_bb), then exact inference on y - b
    x, y = linear_data(20, generator=generator)
    posterior = full_posterior(linear_model(), generator)
    net = torch.nn.Linear(2, 1).to(DTYPE)
    with torch.no_grad():
        net.bias.fill_(2.0)
    model = kn.Model(net, kn.Gaussian(0.1), prior=posterior, frozen="bias")
    found = kn.ExactLinear().fit(model, (x, y))
    covariance, gain = posterior.covariance, posterior.covariance[:2, 2] / posterior.covariance[2, 2]
    mean = posterior.loc[:2] + gain * (2.0 - posterior.loc[2])
    precision = (covariance[:2, :2] - gain.outer(covariance[2, :2])).inverse()
    total = precision + x.T @ x / 0.01
    expected = torch.linalg.solve(total, precision @ mean + x.T @ (y.squeeze(1) - 2.0) / 0.01)
    torch.testing.assert_close(found.loc, expected)
    torch.testing.assert_close(found.covariance, total.inverse())
