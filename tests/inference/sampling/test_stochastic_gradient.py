"""What the stochastic-gradient samplers share, on all of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.target import ModelTarget
from knowable.core.model.data import as_data
from knowable.inference.sampling import SGHMC, SGLD, CyclicalSGMCMC
from knowable.inference.sampling.metric import Window
from knowable.inference.sampling.stochastic_gradient import estimate
from knowable.testing.densities import correlated_gaussian
from knowable.testing.targets import LinearGaussian
from tests.core.chain_cases import copied, same_state

SAMPLERS = [
    SGLD(chains=4),
    SGHMC(chains=4),
    CyclicalSGMCMC(chains=4, cycle_steps=30),
    SGLD(chains=4, preconditioned=True),
    SGLD(chains=4, steps=1),
]
PROBLEM = LinearGaussian.make(60, 3)


def _target(data=PROBLEM.data):
    model = PROBLEM.model()
    return ModelTarget(model, as_data(data, model), points={}, buffers={})


def _advance(sampler, target, calls, state=None):
    """``calls`` of the kernel, some of the warm-up and some beyond, on a fresh kernel."""
    kernel, generator = sampler.kernel(4), torch.Generator().manual_seed(0)
    if state is None:
        torch.manual_seed(0)
        state = kernel.init(target, torch.randn(4, 4, dtype=torch.float64), generator=generator)
    for warmup in calls:
        state, block = kernel.advance(target, state, 5, generator=generator, warmup=warmup)
    return state, block


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_chain_that_is_taken_up_by_another_kernel_goes_on_with_the_same_batches_and_bits(sampler):
    sampler = dataclasses.replace(sampler, batch_size=8)
    calls = [WarmUp(0, 15), WarmUp(5, 15), WarmUp(10, 15), None, None]
    target = _target()
    whole, last = _advance(sampler, target, calls)
    half, _ = _advance(sampler, target, calls[:3])
    between = torch.get_rng_state()
    torch.randn(100)
    torch.set_rng_state(between)
    generator = torch.Generator().manual_seed(0)
    kernel = sampler.kernel(4)
    for warmup in calls[3:]:
        half, block = kernel.advance(target, half, 5, generator=generator, warmup=warmup)
    assert same_state(whole, half)
    assert torch.equal(last.positions, block.positions) and torch.equal(last.values, block.values)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_advance_leaves_the_state_it_was_given_alone(sampler):
    target = _target()
    state, _ = _advance(dataclasses.replace(sampler, batch_size=8), target, [WarmUp(0, 5)])
    before = copied(state)
    _advance(dataclasses.replace(sampler, batch_size=8), target, [None], state)
    assert same_state(state, before)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_values_are_the_log_densities_of_the_draws(sampler):
    target = _target()
    _, block = _advance(sampler, target, [WarmUp(0, 5), None])
    for position, value in zip(block.positions, block.values, strict=True):
        torch.testing.assert_close(target.value(position), value)


@pytest.mark.parametrize("sampler", [SGLD(chains=8), SGHMC(chains=8)], ids=repr)
def test_noise_of_batches_is_measured_and_kept_to_a_fifth(sampler):
    # V of a batch of B rows drawn with replacement is N^2 / B times the variance of the rows' gradients
    sampler = dataclasses.replace(sampler, batch_size=10, mass="identity")
    target = _target()
    kernel, generator = sampler.kernel(4), torch.Generator().manual_seed(1)
    start = target.layout.flatten(PROBLEM.as_params(PROBLEM.mean)).expand(8, 4).clone()
    state = kernel.init(target, start, generator=generator)
    state, _ = kernel.advance(target, state, 150, generator=generator, warmup=WarmUp(50, 200))
    residual = PROBLEM.y.squeeze(1) - PROBLEM.design @ PROBLEM.mean
    rows = PROBLEM.design * residual.unsqueeze(1) / PROBLEM.noise**2
    expected = 60**2 / 10 * rows.var(0, correction=0)
    # at draws residuals vary by their own uncertainty besides, some D / N of it; a running mean over 50 x 8 pairs of a
    # squared near-normal has a standard error of sqrt(2 / 400) = 7%: 4 of them, and that D / N
    assert ((state.noise / expected - 1).abs() < 4 * 0.07 + 2 * 4 / 60).all()
    share = kernel.tuned(state)["batch_noise"]
    assert share == pytest.approx(kernel.batch_noise(state.noise, kernel.leapfrog(state)).mean().item())
    assert share < 0.2 + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SGLD, SGHMC])
def test_defaults_give_the_posterior_from_mini_batches(sampler, seed):
    """Sixteen chains on batches of a quarter of the rows, against the exact posterior.

    Means to 5 standard errors. Variances within 25%: V differs between directions by the condition number of the
    design, the correction has one number for each coordinate, and the noise to be corrected is at most a fifth.
    """
    problem = LinearGaussian.make(400, 2, seed=seed)
    found = sampler(batch_size=100, draws=300, steps=20).fit(problem.model(), problem.data, seed=seed)
    draws = problem.as_flat(found.stack)
    ess = torch.cat([each.reshape(-1) for each in found.weight_diagnostics().ess.values()])
    sd = problem.covariance.diagonal().sqrt()
    assert ((draws.mean(0) - problem.mean).abs() < 5 * sd / ess.sqrt()).all()
    ratio = draws.var(0) / problem.covariance.diagonal()
    assert ((ratio - 1).abs() < 0.25 + 4 * (2 / ess).sqrt()).all()
    assert 0 < found.diagnostics.terms["batch_noise"] < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [SGLD, SGHMC])
def test_scales_that_differ_by_a_million_are_found_in_the_warm_up(sampler, seed):
    density = correlated_gaussian(4, correlation=0.5, ratio=1e6)
    samples = sampler(chains=16, draws=400).sample(density.log_density, density.start(), seed=seed)
    draws = samples.draws["x"]
    ratio = draws.flatten(0, 1).var(0) / density.covariance.diagonal()
    # 2.5% bias at most, and the standard error of a variance from the smallest ess
    assert ((ratio - 1).abs() < 0.03 + 4 * (2 / samples.diagnostics.ess["x"]).sqrt()).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("sampler", [SGLD, SGHMC])
@pytest.mark.parametrize("mass", ["identity", "diagonal"])
def test_fused_or_not_the_steps_on_batches_are_the_same(sampler, mass, chains):
    ends = {}
    for mode in ("traced", "compiled"):
        model = PROBLEM.model()
        target = ModelTarget(model, as_data(PROBLEM.data, model), points={}, buffers={}, mode=mode)
        kernel = sampler(step_size=1e-3, batch_size=8, mass=mass).kernel(4)
        torch.manual_seed(0)
        start = torch.randn(chains, 4, dtype=torch.float64)
        state = kernel.init(target, start, generator=torch.Generator().manual_seed(0))
        state, _ = kernel.advance(target, state, 2, generator=torch.Generator().manual_seed(0))
        ends[mode] = state
        assert (mode == "compiled") == bool(target.step_graphs)
        assert target.gradients == 21 * chains and target.function.calls == 21
    for name in ("position", "gradient", "value"):
        torch.testing.assert_close(getattr(ends["compiled"], name), getattr(ends["traced"], name), rtol=1e-9, atol=1e-9)
        assert not torch.equal(ends["traced"].position, start)


# --- the mass matrix from positions and gradients ---------------------------------------------------------------------


def _window(positions, precision, kind):
    """A window of positions ``(n, C, D)`` of a normal with this precision."""
    seen = Window.open(positions[0], -positions[0] @ precision, dense=kind == "dense")
    for each in positions[1:]:
        seen = seen.observe(each, -each @ precision)
    return seen


@pytest.mark.parametrize("extent", [1.0, 0.01])
def test_dense_estimate_is_the_covariance_of_a_normal_however_little_of_it_was_seen(generator, extent):
    # for a normal, Cov(g) = P Cov(x) P, and then Cov(x) # Cov(g)^-1 = P^-1 whatever Cov(x); what is left is the
    # shrinkage of correlations by (D / C n)^2 = (5 / 4000)^2, times the condition of Cov(g), about 10^3
    covariance = correlated_gaussian(5, correlation=0.6, ratio=2.0).covariance
    positions = extent * torch.randn((1001, 4, 5), generator=generator, dtype=torch.float64)
    found = estimate(_window(positions, torch.linalg.inv(covariance), "dense"))
    torch.testing.assert_close(found, covariance, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("extent", [1.0, 0.01])
def test_diagonal_estimate_has_the_variances_of_independent_coordinates(generator, extent):
    variance = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64)
    positions = extent * torch.randn((20, 4, 3), generator=generator, dtype=torch.float64)
    found = estimate(_window(positions, torch.diag(1 / variance), "diagonal"))
    torch.testing.assert_close(found, variance)


def test_too_few_positions_or_gradients_that_do_not_change_tell_nothing(generator):
    positions = torch.randn((4, 4, 3), generator=generator, dtype=torch.float64)
    assert estimate(_window(positions, torch.eye(3, dtype=torch.float64), "diagonal")) is None
    positions = torch.randn((20, 4, 3), generator=generator, dtype=torch.float64)
    assert estimate(_window(positions, torch.zeros(3, 3, dtype=torch.float64), "dense")) is None
