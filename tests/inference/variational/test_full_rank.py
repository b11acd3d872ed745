from __future__ import annotations

import pytest
import scipy.optimize
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.testing import BananaRegression, LinearGaussian
from tests.inference.variational.family_oracle import dense_moments, normal_divergence

QUICK = {"epochs": 1500, "learning_rate": 0.03}


def features_and_head(seed: int) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """A network with random features, and data."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.randn(50, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.3 * torch.randn(50, 1, generator=generator, dtype=torch.float64)
    return net, x, y


def regression_on(features: torch.Tensor, y: torch.Tensor, noise: float) -> LinearGaussian:
    return LinearGaussian(features.detach(), y, noise, 1.0)


def test_last_layer_is_bayesian_linear_regression_on_the_features(seed):
    # to 1e-3: means and predictions in units of their standard deviations, standard deviations and correlations as they
    # are; the divergence from the exact posterior is then about the square of that
    net, x, y = features_and_head(seed)
    model = kn.Model(net, kn.Gaussian(0.3), random="last_layer", frozen="0.*")
    posterior = kn.FullRankVI(**QUICK).fit(model, (x, y), seed=seed)
    exact = regression_on(net[:2](x), y, 0.3)
    loc, covariance = posterior.loc, posterior.covariance
    std, exact_std = covariance.diagonal().sqrt(), exact.covariance.diagonal().sqrt()
    assert ((loc - exact.mean) / exact_std).abs().max() < 1e-3
    assert (std / exact_std - 1).abs().max() < 1e-3
    assert (covariance / std.outer(std) - exact.covariance / exact_std.outer(exact_std)).abs().max() < 1e-3
    assert normal_divergence(loc, covariance, exact.mean, exact.precision) < 1e-5
    new = torch.randn(20, 2, dtype=torch.float64)
    design = torch.cat([net[:2](new), torch.ones(20, 1, dtype=torch.float64)], 1).detach()
    mean, spread = exact.predictive(net[:2](new).detach())
    assert ((design @ loc - mean) / spread).abs().max() < 1e-3
    found = ((design @ covariance * design).sum(1) + 0.3**2).sqrt()
    assert (found / spread - 1).abs().max() < 1e-3


@pytest.mark.slow
def test_head_on_features_that_are_learned_is_regression_on_those_they_became(seed):
    # the head follows the features, which move all along: within 0.3 nats of the optimum for those they ended
    # as; a KL that is wrong by a factor of two would cost 0.15 nats a weight, 1 in all
    net, x, y = features_and_head(seed)
    model = kn.Model(net, kn.Gaussian(0.3), random="last_layer")
    posterior = kn.FullRankVI(epochs=2000, learning_rate=0.01).fit(model, (x, y), seed=seed)
    features = torch.tanh(nn.functional.linear(x, posterior.points["0.weight"], posterior.points["0.bias"]))
    exact = regression_on(features, y, 0.3)
    assert normal_divergence(posterior.loc, posterior.covariance, exact.mean, exact.precision) < 0.3


def test_bound_is_the_evidence_where_the_posterior_is_normal(seed):
    problem = LinearGaussian.make(n=30, d=4, noise=0.7, correlation=0.8, seed=seed)
    posterior = kn.FullRankVI(**QUICK).fit(problem.model(), problem.data, seed=seed)
    loc, covariance = dense_moments(posterior, Layout.of(problem.model().params()))
    assert normal_divergence(loc, covariance, problem.mean, problem.precision) < 1e-4
    assert abs(posterior.log_evidence - problem.log_evidence) < 4 * posterior.log_evidence.standard_error


def test_fit_of_a_bent_posterior_is_the_best_normal(seed):
    # the best mean and Cholesky factor by scipy on the exact bound; 0.02 nats for Adam's last steps
    problem = BananaRegression()
    posterior = kn.FullRankVI(epochs=800, learning_rate=0.03, draws=4).fit(problem.model(), problem.data, seed=seed)

    def negative(at) -> float:
        factor = torch.tensor([[0.0, 0.0], [at[4], 0.0]], dtype=torch.float64) + torch.tensor(at[2:4]).exp().diag()
        return -problem.elbo(torch.tensor(at[:2]), factor @ factor.T)

    best = scipy.optimize.minimize(negative, [0.0, 0.0, -1.0, -1.0, 0.0], method="BFGS")
    found = problem.elbo(posterior.loc, posterior.covariance)
    assert found <= -best.fun + 1e-6
    assert found > -best.fun - 0.02
    assert abs(posterior.log_evidence - found) < 4 * posterior.log_evidence.standard_error
    assert found < problem.log_evidence - 0.02  # and no normal is the posterior


@pytest.mark.slow
def test_network_with_few_rows_is_not_carried_away_by_noise(seed):
    # 61 weights, 40 rows, one draw a step: about level with mean field (a correlated normal has further to go), where
    # steps that are too long lose thousands of nats
    torch.manual_seed(seed)
    data = kn.datasets.sine_with_gap(n=40, noise=0.1, seed=seed)
    model = kn.Model(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)), kn.Gaussian(0.1))
    full, independent = (
        method(epochs=3000).fit(model, data, seed=seed).log_evidence for method in (kn.FullRankVI, kn.MeanFieldVI)
    )
    assert full > independent - 40


def test_too_many_weights_are_refused_until_the_limit_is_raised():
    problem = LinearGaussian.make(n=20, d=5)
    with pytest.raises(kn.Unsupported, match="max_parameters is 5"):
        kn.FullRankVI(epochs=1, max_parameters=5).fit(problem.model(), problem.data)
    kn.FullRankVI(epochs=1, max_parameters=6).fit(problem.model(), problem.data)
    big = kn.Model(nn.Linear(5000, 1), kn.Gaussian(0.1))
    with pytest.raises(kn.Unsupported, match="5,001 x 5,001 matrix"):
        kn.FullRankVI(epochs=1).fit(big, (torch.zeros(2, 5000), torch.zeros(2, 1)))
