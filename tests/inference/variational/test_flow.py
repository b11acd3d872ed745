"""Tests of variational inference with flows: shapes that no normal has, and bounds that are what they say."""

from __future__ import annotations

import functools

import pytest
import torch

import knowable as kn
from knowable.core.flow_posterior import FlowPosterior
from knowable.testing import LinearGaussian
from tests.core.cases import DTYPE, linear_data, mlp
from tests.inference.variational.banana import Banana

KINDS = ["real_nvp", "planar", "radial"]
BENT = {"epochs": 1500, "learning_rate": 0.02, "draws": 16}


@functools.cache
def on_a_banana(seed: int, method: kn.MeanFieldVI | kn.FullRankVI | kn.FlowVI) -> tuple[Banana, kn.Posterior]:
    problem = Banana.make(seed)
    return problem, method.fit(problem.model(), problem.data, seed=seed)


def test_a_flow_follows_a_banana_as_no_normal_can(seed):
    found = {}
    for name, method in {
        "flow": kn.FlowVI(**BENT),
        "full": kn.FullRankVI(**BENT),
        "mean field": kn.MeanFieldVI(**BENT),
    }.items():
        problem, posterior = on_a_banana(seed, method)
        found[name] = problem.divergence(posterior)
    # by symmetry the two weights are not correlated, so that the best normal is the same with and without correlations
    assert found["full"] == pytest.approx(found["mean field"], abs=0.05)
    assert 0 < found["flow"] < 0.25 * found["full"]


@pytest.mark.parametrize("kind", KINDS)
def test_bound_and_divergence_make_up_the_evidence_of_a_banana(seed, kind):
    problem, posterior = on_a_banana(seed, kn.FlowVI(**BENT, kind=kind))
    bound = posterior.log_evidence
    assert bound.kind == "bound"
    # the divergence is by integration, good to a few thousandths
    assert abs(bound + problem.divergence(posterior) - problem.log_evidence) < 4 * bound.standard_error + 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_bound_and_divergence_make_up_the_evidence_of_a_linear_model(seed, kind):
    # log q - log p(θ | D) at draws of q, with the exact posterior: its mean is the divergence
    problem = LinearGaussian.make(n=30, d=3, noise=0.7, seed=seed)
    posterior = kn.FlowVI(epochs=400, learning_rate=0.03, draws=4, kind=kind).fit(problem.model(), problem.data)
    draws = posterior.sample(4000, torch.Generator().manual_seed(seed))
    exact = torch.distributions.MultivariateNormal(problem.mean, problem.covariance)
    ratio = posterior.log_prob(draws) - exact.log_prob(problem.as_flat(draws))
    kl, error = ratio.mean().item(), ratio.std().item() / 4000**0.5
    bound = posterior.log_evidence
    assert abs(bound + kl - problem.log_evidence) < 4 * (bound.standard_error**2 + error**2) ** 0.5


def test_a_flow_finds_the_correlations_of_a_linear_model(seed):
    # mean field loses half a nat or more here; the flow nearly nothing
    problem = LinearGaussian.make(n=30, d=2, noise=0.7, seed=seed, correlation=0.8)
    lost = problem.log_evidence - problem.elbo()
    posterior = kn.FlowVI(epochs=1000, learning_rate=0.02, draws=8).fit(problem.model(), problem.data, seed=seed)
    bound = posterior.log_evidence
    assert lost > 0.4
    assert problem.log_evidence - bound < 0.1 + 4 * bound.standard_error


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_along_the_path_is_the_gradient(seed, kind):
    # both are unbiased: their means over many draws agree within 5 standard errors
    problem = Banana.make(seed)
    objectives = []
    for kl_gradient in ("closed", "path"):
        torch.manual_seed(seed)
        method = kn.FlowVI(kind=kind, layers=2, hidden=3, draws=500, kl_gradient=kl_gradient)
        objective = method.objective(problem.model(), problem.data[0], 4)
        with torch.no_grad():
            for value in objective.parameters():
                value.add_(0.3 * torch.randn_like(value))
        objectives.append(objective)
    found = []
    for objective in objectives:
        each = []
        for _ in range(40):
            loss, _ = objective(*problem.data)
            each.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(objective.parameters()))]))
        found.append(torch.stack(each))
    error = sum(each.var(0) / 40 for each in found).sqrt()
    assert ((found[0].mean(0) - found[1].mean(0)).abs() <= 5 * error + 1e-12).all()


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
    assert kn.FlowVI(kind="planar", layers=3).own_family == kn.families.Flow("planar", 3)
    assert kn.FlowVI(hidden=5).own_family == kn.families.Flow("real_nvp", hidden=5)


@pytest.mark.parametrize("knobs", [{"kind": "glow"}, {"layers": 0}, {"hidden": -1}, {"draws": 0}], ids=str)
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises((kn.InvalidArgument, kn.InvalidType), match=next(iter(knobs))):
        kn.FlowVI(**knobs)
