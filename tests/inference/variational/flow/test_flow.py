"""Tests of variational inference with flows: shapes that no normal has, and bounds that are what they say."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.inference.variational.flow.posterior import FlowPosterior
from knowable.testing import BananaRegression, LinearGaussian
from tests.core.cases import DTYPE, linear_data, mlp

KINDS = ["planar", "radial", "real_nvp"]
DRAWS = 4000


def divergence(
    problem: BananaRegression | LinearGaussian, posterior: kn.Posterior, seed: int
) -> tuple[float, float]:  # fmt: skip
    """KL(q ‖ posterior) from draws of q, and its standard error."""
    draws = posterior.sample(DRAWS, torch.Generator().manual_seed(seed))
    if isinstance(problem, BananaRegression):
        exact = problem.log_posterior(problem.as_flat(draws))
    else:
        normal = torch.distributions.MultivariateNormal(problem.mean, problem.covariance)
        exact = normal.log_prob(problem.as_flat(draws))
    ratio = posterior.log_prob(draws) - exact
    return ratio.mean().item(), ratio.std().item() / math.sqrt(DRAWS)


def test_a_flow_follows_a_banana_as_no_normal_can(seed):
    problem = BananaRegression()
    settings = {"epochs": 500, "learning_rate": 0.03, "draws": 4}
    normal = kn.FullRankVI(**settings).fit(problem.model(), problem.data, seed=seed)
    flow = kn.FlowVI(**settings).fit(problem.model(), problem.data, seed=seed)
    lost = problem.divergence(normal.loc, normal.covariance)
    kl, error = divergence(problem, flow, seed)
    assert -4 * error < kl < 0.6 * lost - 4 * error


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["planar", "real_nvp"])
def test_more_steps_and_draws_bring_a_flow_closer_to_a_banana(seed, kind):
    problem = BananaRegression()
    method = kn.FlowVI(epochs=2000, learning_rate=0.02, draws=16, kind=kind)
    kl, error = divergence(problem, method.fit(problem.model(), problem.data, seed=seed), seed)
    assert kl < 0.15 + 4 * error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", [BananaRegression(), LinearGaussian.make(n=30, noise=0.7)], ids=["bent", "linear"])
def test_bound_and_divergence_make_up_the_evidence(seed, problem, kind):
    # they do wherever the fit has got to
    method = kn.FlowVI(epochs=60, learning_rate=0.05, draws=2, kind=kind, initial_scale=0.1)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    (kl, error), bound = divergence(problem, posterior, seed), posterior.log_evidence
    assert bound.kind == "bound"
    assert abs(bound + kl - problem.log_evidence) < 4 * math.hypot(bound.standard_error, error)


def test_a_flow_may_have_some_of_the_weights(seed):
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1)), linear_data()
    posterior = kn.MeanFieldVI(epochs=3, families={"2.*": kn.families.Flow("planar", 2)}).fit(model, data, seed=seed)
    assert isinstance(posterior, kn.ProductPosterior)
    part = posterior.part_of("2.bias")
    assert isinstance(part, FlowPosterior) and part.layout.names == ("2.weight", "2.bias")
    assert isinstance(posterior.part_of("0.weight"), kn.DiagonalNormal)
    draws = posterior.sample(3)
    torch.testing.assert_close(
        posterior.log_prob(draws), part.log_prob(draws) + posterior.part_of("0.weight").log_prob(draws)
    )
    turned = kn.FlowVI(epochs=3, families={"0.*": kn.families.MeanField()}).fit(model, data, seed=seed)
    assert isinstance(turned.part_of("2.weight"), FlowPosterior)  # type: ignore[attr-defined]


def test_settings_reach_the_family():
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
    (part,) = kn.FlowVI(kind="radial", layers=3).objective(model, torch.zeros(3, 2), 3).parts
    assert [layer.kind for layer in part.flow.layers] == ["radial"] * 3  # type: ignore[attr-defined]
