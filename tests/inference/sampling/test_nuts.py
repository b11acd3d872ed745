"""Tests of the No-U-Turn sampler."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.testing import LinearGaussian
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from tests.inference.sampling.invariance import expect_invariance
from tests.inference.sampling.moments import expect_moments

TRACED = kn.Engine(mode="traced")


@pytest.mark.parametrize("density", [banana(), funnel(), bimodal(), correlated_gaussian(4)], ids=lambda d: d.name)
def test_a_transition_leaves_the_density_as_it_is(density, seed):
    expect_invariance(kn.NUTS(step_size=0.3, mass="identity", max_depth=5).kernel(len(density.mean)), density, seed)


@pytest.mark.slow
def test_draws_have_the_moments_of_the_density(seed):
    density = correlated_gaussian(10)
    samples = kn.NUTS(chains=8).sample(density.log_density, density.start(), seed=seed, engine=TRACED)
    expect_moments(samples, density)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "density", [correlated_gaussian(50), banana(), funnel(), bimodal()], ids=lambda density: density.name
)
def test_defaults_have_the_moments_of_the_density(density, seed):
    expect_moments(kn.NUTS().sample(density.log_density, density.start(), seed=seed), density)


@pytest.mark.slow
def test_a_conjugate_model_has_its_exact_posterior(seed):
    problem = LinearGaussian.make(seed=seed)
    posterior = kn.NUTS(chains=8, draws=200, start="network").fit(problem.model(), problem.data, seed=seed)
    draws = problem.as_flat(posterior.stack).unflatten(0, (8, -1))
    ess = kn.metrics.ess(draws)
    score = (draws.mean((0, 1)) - problem.mean) / (problem.covariance.diagonal() / torch.as_tensor(ess)).sqrt()
    assert score.abs().max() < 4.5
    ratio = draws.flatten(0, 1).var(0) / problem.covariance.diagonal()
    assert ((ratio - 1).abs() < 4.5 * (2 / torch.as_tensor(ess)).sqrt()).all()


def test_trajectories_stop_where_they_turn_back(seed):
    # a standard normal: half a turn takes time π, so that a trajectory usually has between π and 2 π / step steps (now
    # and then its ends meet after a whole turn, and it goes on)
    step = 0.1
    found = kn.NUTS(chains=8, draws=50, warmup=0, step_size=step, mass="identity").sample(
        lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(20, dtype=torch.float64)}, seed=seed, engine=TRACED
    )
    taken = found.info["steps"]
    assert 31 <= taken.median() <= 63 and taken.min() >= 15
    assert found.info["diverging"].sum() == 0


def test_a_step_that_is_far_too_long_diverges_and_is_told():
    found = kn.NUTS(chains=2, draws=20, warmup=0, step_size=50.0, mass="identity").sample(
        lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.ones(3, dtype=torch.float64)}, engine=TRACED
    )
    assert found.diagnostics["divergences"] == 40
    assert (found.draws["x"] == found.draws["x"][:, :1]).all()  # it stays where it is


@pytest.mark.parametrize(
    "wrong", [{"step_size": 0.0}, {"mass": "full"}, {"target_acceptance": 1.0}, {"max_depth": 0}, {"max_depth": 40}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(kn.InvalidArgument, match=next(iter(wrong))):
        kn.NUTS(**wrong)
