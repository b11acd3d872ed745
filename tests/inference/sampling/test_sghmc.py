from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from knowable.errors import InvalidArgument
from knowable.inference.sampling import SGHMC
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from tests.inference.sampling.gaussian_targets import Gaussian, expect_variance, stationary_variance
from tests.inference.sampling.moments import expect_moments, limit, z_scores

SCALES = [0.7, 1.5]


@pytest.mark.parametrize("friction", [0.5, 4.0])
@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_stationary_variance_is_that_of_the_discretisation(seed, noise, friction):
    # the fixed point of the linear map: s^2 (1 + h^2 V (1 + c) / ((1 - c)(4 - h^2 / s^2))), exact at any step if V = 0;
    # the slowest chain forgets at a rate of about min(friction / 2, 1 / (friction s^2)) > 0.1 a unit of time: 60 units
    target, step = Gaussian(SCALES, noise=noise), 0.6
    found = stationary_variance(SGHMC(step_size=step, friction=friction), target, transitions=10)
    kept = math.exp(-friction * step)
    inflation = step**2 * noise * (1 + kept) / ((1 - kept) * (4 - step**2 / target.scale**2))
    expect_variance(found, target.scale**2 * (1 + inflation))


def test_variance_grows_with_the_temperature(seed):
    target = Gaussian(SCALES, temperature=0.25)
    found = stationary_variance(SGHMC(step_size=0.5, temperature=0.25), target, transitions=15)
    expect_variance(found, 0.25 * target.scale**2)


@pytest.mark.parametrize("mass", ["diagonal", "dense"])
def test_mass_changes_the_steps_and_not_the_target(seed, mass):
    target = Gaussian(SCALES)
    kernel, generator = SGHMC(step_size=0.4, mass=mass).kernel(2), torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.randn(20_000, 2, dtype=torch.float64) * target.scale, generator=generator)
    masses = torch.tensor([0.5, 3.0], dtype=torch.float64)
    state = replace(state, inverse_mass=masses if mass == "diagonal" else masses.diag())
    for _ in range(15):
        state, _ = kernel.advance(target, state, 1, generator=generator)
    expect_variance(state.position.var(0), target.scale**2)


def test_noise_of_batches_that_is_known_is_taken_off(seed):
    # to the order h^2 / 4 that the step's width beside the posterior's makes: 0.04 / 4 of a share of 0.4
    target = Gaussian([1.0, 1.0], noise=8.0)
    kernel, generator = SGHMC(step_size=0.2).kernel(2), torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.randn(20_000, 2, dtype=torch.float64), generator=generator)
    state = replace(state, noise=torch.full_like(target.scale, 8.0), noise_count=1)
    assert kernel.batch_noise(state.noise, 0.2)[0] == pytest.approx(0.4, abs=0.02)
    for _ in range(30):
        state, _ = kernel.advance(target, state, 1, generator=generator)
    expect_variance(state.position.var(0), torch.full((2,), 1.004, dtype=torch.float64))


@pytest.mark.slow
def test_defaults_have_the_right_moments_of_a_normal(seed):
    density = correlated_gaussian(5)
    expect_moments(SGHMC(draws=250).sample(density.log_density, density.start(), seed=seed), density)


@pytest.mark.slow
@pytest.mark.parametrize("density", [banana(), bimodal(), correlated_gaussian(50)], ids=lambda each: each.name)
def test_defaults_stop_by_themselves_and_have_the_right_moments(density, seed):
    # normals have no bias; the others have one of order h^2, below what 8,000 draws show
    expect_moments(SGHMC().sample(density.log_density, density.start(), seed=seed), density)


@pytest.mark.slow
def test_funnel_has_its_quantiles_and_a_variance_to_a_third(seed):
    # the neck is narrower than the step is tuned for
    density = funnel()
    samples = SGHMC(draws=4000).sample(density.log_density, density.start(), seed=seed)
    scores = z_scores(samples.draws["x"], density)
    quantiles = torch.cat([each for name, each in scores.items() if name.startswith("quantile")])
    assert (quantiles.abs() < limit(len(quantiles))).all()
    v = samples.draws["x"][..., 0]
    assert abs(v.var() / density.covariance[0, 0] - 1) < 0.33 + 4 * (2 / samples.diagnostics.ess["x"][0]).sqrt()


def test_settings_out_of_range_are_refused():
    with pytest.raises(InvalidArgument, match="friction"):
        SGHMC(friction=0.0)
