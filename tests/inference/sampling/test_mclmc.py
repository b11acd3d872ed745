"""Tests of microcanonical Langevin Monte Carlo."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import knowable as kn
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling import mclmc
from knowable.inference.sampling.mclmc import Walk, isokinetic_walk, turn, unit
from knowable.inference.sampling.metric import Metric
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from tests.inference.sampling.invariance import expect_invariance
from tests.inference.sampling.moments import expect_moments

TRACED = kn.Engine(mode="traced")


@pytest.mark.parametrize("density", [banana(), funnel(), bimodal(), correlated_gaussian(4)], ids=lambda d: d.name)
def test_an_adjusted_transition_leaves_the_density_as_it_is(density, seed):
    expect_invariance(kn.MCLMC(step_size=0.5, length=2.0, mass="identity").kernel(len(density.mean)), density, seed)


@pytest.mark.parametrize("density", [correlated_gaussian(10), bimodal()], ids=lambda d: d.name)
def test_draws_have_the_moments_of_the_density(density, seed):
    samples = kn.MCLMC(chains=8).sample(density.log_density, density.start(), seed=seed, engine=TRACED)
    expect_moments(samples, density)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "density", [correlated_gaussian(50), banana(), funnel(), bimodal()], ids=lambda density: density.name
)
def test_defaults_have_the_moments_of_the_density(density, seed):
    expect_moments(kn.MCLMC().sample(density.log_density, density.start(), seed=seed), density)


@pytest.mark.parametrize("given", [None, 0.5])
def test_every_fifth_trajectory_takes_smaller_steps_where_they_are_tuned(given, generator, monkeypatch):
    density = correlated_gaussian(4)
    target = DensityTarget(density.log_density, Layout.of(density.start()), mode="eager")
    kernel = mclmc.MCLMCKernel(kn.MCLMC(step_size=given), "identity")
    state = kernel.init(target, torch.zeros(3, 4, dtype=torch.float64), generator=generator)
    usual = kernel.tuned(state)["step_size"]
    seen, walk = [], mclmc.isokinetic_walk

    def watched(target, metric, start, step, count):
        seen.append(step)
        return walk(target, metric, start, step, count)

    monkeypatch.setattr(mclmc, "isokinetic_walk", watched)
    kernel.advance(target, state, 10, generator=generator)
    small = usual if given else usual / 4
    assert seen == [small if number % 5 == 0 else usual for number in range(10)]


@pytest.mark.slow
def test_one_dimension_works_too(seed):
    found = kn.MCLMC(chains=8, draws=300).sample(
        lambda p: -0.5 * ((p["x"] - 3) / 2) ** 2, {"x": torch.zeros((), dtype=torch.float64)}, seed=seed, engine=TRACED
    )
    draws, ess = found.draws["x"], found.diagnostics.ess["x"]
    assert abs(draws.mean() - 3) < 4.5 * 2 / ess.sqrt()
    assert abs(draws.var() / 4 - 1) < 4.5 * (2 / ess).sqrt()


def test_the_bias_without_a_metropolis_test_grows_with_the_energy_error(seed):
    # variance of a 20-d standard normal: right for a small energy error, visibly off for a large one
    def variance(energy_variance: float) -> tuple[float, float]:
        found = kn.MCLMC(
            chains=16, draws=300, adjusted=False, energy_variance=energy_variance, mass="identity", length=4.0
        ).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(20, dtype=torch.float64)}, seed=seed,
                 engine=TRACED)  # fmt: skip
        draws = found.draws["x"]
        return draws.var().item(), (2 / found.diagnostics.ess["x"].sum()).sqrt().item()

    small, error = variance(5e-4)
    assert abs(small - 1) < 4.5 * error + 0.02  # 2%: the bias that the default stands for
    large, error = variance(0.5)
    assert abs(large - 1) > 4.5 * error + 0.02


@pytest.mark.parametrize(
    "wrong",
    [{"step_size": -1.0}, {"length": 0.0}, {"mass": "x"}, {"target_acceptance": 0.0}, {"energy_variance": 0.0}],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(kn.InvalidArgument, match=next(iter(wrong))):
        kn.MCLMC(**wrong)


# --- the flow ---------------------------------------------------------------------------------------------------------


def _walk(generator: torch.Generator, d: int = 6, chains: int = 50) -> tuple[DensityTarget, Metric, Walk]:
    target = DensityTarget(lambda p: -0.25 * (p["x"] ** 4).sum(), Layout.of({"x": torch.zeros(d)}), mode="traced")
    position = torch.randn((chains, d), generator=generator, dtype=torch.float64)
    direction = unit(torch.randn((chains, d), generator=generator, dtype=torch.float64))
    value, gradient = target.value_and_grad(position)
    extra = torch.zeros((chains, 0), dtype=torch.float64)
    metric = Metric(torch.ones(d, dtype=torch.float64))
    return target, metric, Walk(position, extra, direction, value, gradient, torch.zeros(chains, dtype=torch.float64))


def test_a_turn_solves_its_differential_equation(generator):
    # du/dt = (I - u uᵀ) g / (d - 1), by many small Euler steps
    u = unit(torch.randn((4, 5), generator=generator, dtype=torch.float64))
    g = torch.randn((4, 5), generator=generator, dtype=torch.float64)
    time, steps = 0.7, 20_000
    slow, kinetic = u.clone(), torch.zeros(4, dtype=torch.float64)
    for _ in range(steps):
        along = (slow * g).sum(1, keepdim=True)
        kinetic += time / steps * along.squeeze(1)  # d/dt of (d - 1) log of the speed's weight
        slow = slow + time / steps * (g - along * slow) / 4
    new, gain = turn(u, g, torch.full((4,), time, dtype=torch.float64))
    torch.testing.assert_close(new, unit(slow), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gain, kinetic, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(new.square().sum(1), torch.ones(4, dtype=torch.float64))


def test_turning_the_direction_round_leads_back(generator):
    target, metric, walk = _walk(generator)
    there = isokinetic_walk(target, metric, walk, 0.3, 5)
    back = isokinetic_walk(target, metric, replace(there, direction=-there.direction), 0.3, 5)
    torch.testing.assert_close(back.position, walk.position)
    torch.testing.assert_close(back.direction, -walk.direction)
    torch.testing.assert_close(back.energy, torch.zeros_like(back.energy), atol=1e-10, rtol=0)


def test_steps_together_are_steps_one_by_one(generator):
    target, metric, walk = _walk(generator)
    single = walk
    for _ in range(4):
        single = isokinetic_walk(target, metric, single, 0.2, 1)
    whole = isokinetic_walk(target, metric, walk, 0.2, 4)
    torch.testing.assert_close(whole.position, single.position)
    torch.testing.assert_close(whole.energy, single.energy)


def test_the_energy_error_of_a_step_is_of_third_order(generator):
    target, metric, walk = _walk(generator, chains=400)
    errors = [isokinetic_walk(target, metric, walk, step, 1).energy.square().mean().sqrt() for step in (0.1, 0.05)]
    assert 6 < errors[0] / errors[1] < 11  # 2³
