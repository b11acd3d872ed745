from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from knowable.errors import InvalidArgument
from knowable.inference.sampling import SGLD
from knowable.inference.sampling.sgld import SGLDKernel, decreasing
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from tests.inference.sampling.gaussian_targets import Gaussian, expect_variance, stationary_variance
from tests.inference.sampling.moments import limit, z_scores

SCALES = [0.7, 1.5]


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_stationary_variance_is_that_of_the_discretisation(seed, noise):
    # theta' = (1 - a) theta + sqrt(eps + eps^2 V / 4) xi with a = eps / (2 s^2), of which the fixed point is
    # s^2 (1 + eps V / 4) / (1 - eps / (4 s^2)); 25 x 10 steps forget the start by (1 - a)^500 < 10^-6
    target, step = Gaussian(SCALES, noise=noise), 0.3
    found = stationary_variance(SGLD(step_size=step), target, transitions=25)
    expect_variance(found, target.scale**2 * (1 + step * noise / 4) / (1 - step / (4 * target.scale**2)))


def test_given_step_is_that_of_the_formula_at_any_temperature(seed):
    # theta + eps/2 g + sqrt(eps T) xi has T s^2 / (1 - eps / (4 s^2))
    target, step, temperature = Gaussian(SCALES, temperature=0.25), 0.3, 0.25
    found = stationary_variance(SGLD(step_size=step, temperature=temperature), target, transitions=25)
    expect_variance(found, temperature * target.scale**2 / (1 - step / (4 * target.scale**2)))


@pytest.mark.parametrize("mass", ["diagonal", "dense"])
def test_mass_changes_the_steps_and_not_the_target(seed, mass):
    # with mass M a normal of variance s^2 has s^2 / (1 - eps M / (4 s^2))
    target, step = Gaussian(SCALES), 0.1
    kernel, generator = SGLD(step_size=step, mass=mass).kernel(2), torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.randn(20_000, 2, dtype=torch.float64) * target.scale, generator=generator)
    masses = torch.tensor([0.5, 3.0], dtype=torch.float64)
    state = replace(state, inverse_mass=masses if mass == "diagonal" else masses.diag())
    for _ in range(30):
        state, _ = kernel.advance(target, state, 1, generator=generator)
    expect_variance(state.position.var(0), target.scale**2 / (1 - step * masses / (4 * target.scale**2)))


def test_noise_of_batches_that_is_known_is_taken_off(seed):
    # what is injected makes up the rest, so that only the bias of the step remains
    target, step, noise = Gaussian([1.0, 1.0], noise=3.0), 0.3, 3.0
    sampler = SGLD(step_size=step)
    kernel, generator = sampler.kernel(2), torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.randn(20_000, 2, dtype=torch.float64), generator=generator)
    state = replace(state, noise=torch.full_like(target.scale, noise), noise_count=1)
    for _ in range(25):
        state, _ = kernel.advance(target, state, 1, generator=generator)
    expect_variance(state.position.var(0), 1 / (1 - step / 4) * torch.ones(2, dtype=torch.float64))


def test_decreasing_steps_lose_their_bias_and_draws_stay_as_far_apart_in_time(seed):
    # begun 10^6 steps late the factor is (1 + 10^6 / 1000)^(-1/3) = 0.1
    target, sampler = Gaussian([1.0]), SGLD(step_size=0.8, schedule="decreasing", steps=5)
    kernel, generator = sampler.kernel(1), torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.randn(20_000, 1, dtype=torch.float64), generator=generator)
    _, early = kernel.advance(target, state, 1, generator=generator)
    state = replace(state, taken=10**6)
    late, block = kernel.advance(target, state, 3, generator=generator)
    factor = decreasing(10**6, 1 / 3)
    assert factor == pytest.approx(0.1, rel=1e-3)
    assert (early.info.steps == 5).all() and (block.info.steps == 50).all()
    expect_variance(late.position.var(0), torch.tensor([1 / (1 - 0.08 / 4)]))


def test_preconditioner_that_follows_the_gradients_has_the_bias_of_the_term_it_leaves_out(seed):
    # one chain without memory: Sigma = 1 / (d + |theta|) on a standard normal, draws from p(theta) (d + |theta|), whose
    # second moment is (d + 2 c) / (d + c) with c = E|theta| = sqrt(2 / pi); the pooled, long-memory form has 1
    target, damping = Gaussian([1.0]), 0.5
    kernel = SGLDKernel(SGLD(step_size=0.1, preconditioned=True, steps=8), "diagonal", memory=0.0, damping=damping)
    generator = torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.randn(1, 1, dtype=torch.float64), generator=generator)
    _, block = kernel.advance(target, state, 3000, generator=generator)
    squares = block.positions.reshape(6, 500).square()
    mean = (2 / torch.pi) ** 0.5
    expected = (damping + 2 * mean) / (damping + mean)  # 1.61
    error = squares.mean(1).std() / 6**0.5  # between batches of 500 transitions
    # 4.03 is the 99% point of Student's t with 5 degrees of freedom; the step itself adds less than 10%
    assert abs(squares.mean() - expected) < 4.03 * error + 0.1 * expected
    assert squares.mean() - 4.03 * error > 1.0
    pooled = stationary_variance(SGLD(step_size=0.05, preconditioned=True), target, transitions=60)
    expect_variance(pooled, torch.tensor([1.0 / (1 - 0.05 / 4 / mean)]), chains=8000)  # Sigma is about 1 / rms g = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "density",
    [correlated_gaussian(5), pytest.param(bimodal(), marks=pytest.mark.slow)],
    ids=lambda each: each.name,
)
def test_defaults_are_right_up_to_the_stated_bias(density, seed):
    """Means and quantiles to their standard errors, variances besides to the 2.5% that the largest step brings.

    The 10% and 90% quantiles of a normal that is 1.25% too wide have 0.0022 more outside: it is added to the limit.
    """
    steps = 10 if density.name != "bimodal" else 40  # the valley is crossed now and then only
    samples = SGLD(draws=1000, steps=steps).sample(density.log_density, density.start(), seed=seed)
    draws = samples.draws["x"]
    scores = z_scores(draws, density)
    most = limit(sum(map(len, scores.values())))
    assert samples.diagnostics.terms["step_size"] <= 0.1 + 1e-9
    assert (scores["mean"].abs() < most).all() and (scores["quantile 0.5"].abs() < most).all()
    ess = samples.diagnostics.ess["x"].min()
    for name in ("quantile 0.1", "quantile 0.9"):
        assert (scores[name].abs() < most + 0.0022 / (0.09 / ess).sqrt()).all()
    # the variance's standard error is at least sqrt(2 / S) of it for S draws
    assert (scores["variance"].abs() < most + 0.026 / (2 / (16 * 1000)) ** 0.5).all()


@pytest.mark.slow
def test_banana_keeps_its_middle_and_loses_part_of_its_tails(seed):
    """Medians to their standard errors, variances up to a third too small.

    The step is tuned on the average of the posterior; where it is narrower, steps overshoot and chains leave sooner.
    """
    density = banana()
    samples = SGLD(draws=4000, steps=40).sample(density.log_density, density.start(), seed=seed)
    assert (z_scores(samples.draws["x"], density)["quantile 0.5"].abs() < limit(2)).all()
    ratio = samples.draws["x"].flatten(0, 1).var(0) / density.covariance.diagonal()
    error = (4 / samples.diagnostics.ess["x"].min()).sqrt()
    assert ((ratio > 0.67 - 4 * error) & (ratio < 1 + 4 * error)).all()


@pytest.mark.slow
def test_neck_of_the_funnel_has_a_quarter_too_few_draws(seed):
    # the documented bias: 47% of draws below the median of v, 7.4% below its 10% quantile; measured with 3 seeds, whose
    # step sizes differ, hence a percent of tolerance besides 4 standard errors
    density = funnel()
    samples = SGLD(draws=4000, steps=40).sample(density.log_density, density.start(), seed=seed)
    v, ess = samples.draws["x"][..., 0], samples.diagnostics.ess["x"][0].item()
    for place, expected in ((0.0, 0.472), (-1.5 * 1.2816, 0.074)):
        share = (v < place).double().mean().item()
        assert abs(share - expected) < 0.01 + 4 * (expected * (1 - expected) / ess) ** 0.5


def test_settings_out_of_range_are_refused():
    with pytest.raises(InvalidArgument, match="schedule"):
        SGLD(schedule="falling")
    with pytest.raises(InvalidArgument, match="decay"):
        SGLD(decay=0.0)
    with pytest.raises(InvalidArgument, match="mass"):
        SGLD(preconditioned=True, mass="dense")
