from __future__ import annotations

import math

import pytest
import scipy.optimize
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.full_rank import FullRankModule
from knowable.testing import BananaRegression, LinearGaussian
from tests.inference.variational.family_oracle import (
    Bag,
    check_against_dense,
    check_gradient_of_terms,
    check_start,
    dense_moments,
    layout_of,
    model_of,
    moved,
    normal_divergence,
)

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


# --- full rank family ------------------------------------------------------------------------------------------------


def build(*, whitened: bool = True):
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    return model, loc, FullRankModule(layout, loc, 0.3, whitened=whitened)


def shaken(module: FullRankModule, seed: int) -> FullRankModule:
    """With a base of its own too."""
    if module.base is not None:
        noise = torch.randn(module.base.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        module.base.copy_(noise.tril(-1) + noise.diagonal().exp().diag())
    moved(module, seed)
    return module


def dense(module: FullRankModule) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and covariance, element by element: L = B diag(s) (I + R), m + B u; R = mix / √D where there is a B."""
    size = len(module.loc)
    scale, mix = module.log_scale.detach().exp(), module.mix.detach()
    mix = mix if module.base is None else mix / math.sqrt(size)
    inner = torch.zeros_like(mix)
    for i in range(size):
        for j in range(i + 1):
            inner[i, j] = scale[i] * (1.0 if i == j else mix[i, j])
    base = torch.eye(size, dtype=torch.float64) if module.base is None else module.base
    drift = torch.zeros(size, dtype=torch.float64) if module.drift is None else module.drift.detach()
    return module.loc.detach() + base @ drift, (base @ inner) @ (base @ inner).T


@pytest.mark.parametrize("whitened", [True, False])
def test_it_is_a_normal_with_a_full_covariance(seed, whitened):
    model, _, module = build(whitened=whitened)
    shaken(module, seed)
    check_against_dense(module, model, *dense(module), seed)
    posterior = module.posterior(model)
    assert isinstance(posterior, kn.FullNormal)
    torch.testing.assert_close(posterior.covariance, dense(module)[1])


@pytest.mark.parametrize("whitened", [True, False])
def test_it_starts_where_it_is_told(whitened):
    _, loc, module = build(whitened=whitened)
    check_start(module, loc, 0.3)


def test_terms_in_one_call_have_the_same_gradient(seed):
    check_gradient_of_terms(shaken(build()[2], seed), seed)


def test_base_takes_in_what_was_learned_and_the_distribution_stays(seed):
    _, _, module = build()
    shaken(module, seed)
    mean, covariance = dense(module)
    with torch.no_grad():
        for _ in range(9):
            module.after_step()
        assert module.drift.abs().max() > 0
        module.after_step()
    assert module.drift.abs().max() == module.log_scale.abs().max() == module.mix.abs().max() == 0
    torch.testing.assert_close(dense(module), (mean, covariance))
    torch.testing.assert_close(module.base @ module.base.T, covariance)
    assert (module.base.triu(1) == 0).all() and (module.base.diagonal() > 0).all()


@pytest.mark.parametrize("whitened", [True, False])
def test_what_is_above_the_diagonal_does_not_count(seed, whitened):
    _, _, module = build(whitened=whitened)
    shaken(module, seed)
    before = module.moments()[1]
    values = torch.ones(1, 5, dtype=torch.float64)
    density = module.held_log_density(values)
    with torch.no_grad():
        module.mix.add_(torch.ones_like(module.mix).triu())
    torch.testing.assert_close(module.moments()[1], before, rtol=0, atol=0)
    torch.testing.assert_close(module.held_log_density(values), density, rtol=0, atol=0)
    module.moments()[1].sum().backward()
    assert (module.mix.grad.triu() == 0).all()


def test_too_many_weights_are_refused_with_a_way_out():
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    with pytest.raises(kn.Unsupported, match=r"5 x 5 matrix; max_parameters is 4\. Raise it, .*LowRankVI"):
        kn.families.FullRank(max_parameters=4).build(layout, loc, 0.3)
    kn.families.FullRank(max_parameters=5).build(layout, loc, 0.3)


@pytest.mark.parametrize("value", [0, 2.5, "many"], ids=repr)
def test_limit_must_be_a_count(value):
    with pytest.raises(kn.KnowableError, match="max_parameters"):
        kn.families.FullRank(max_parameters=value)


def test_whitened_coordinates_and_gradients_along_the_draws_are_for_few_weights():
    for size, few in ((300, True), (301, False)):
        model = model_of(Bag(a=(size,)))
        layout = layout_of(model)
        module = kn.families.FullRank().build(layout, layout.flatten(model.params()), 0.1)
        assert module.prefers_path is few and (module.base is not None) is few
