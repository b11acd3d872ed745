"""Tests of microcanonical Langevin Monte Carlo."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import knowable as kn
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.mclmc import Isokinetic, MCLMCKernel
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


class WatchedFlow(Isokinetic):
    """Takes down its steps."""

    seen: ClassVar[list[float]] = []

    def run(self, target, metric, walk, step, count):
        self.seen.append(step)
        return super().run(target, metric, walk, step, count)


@pytest.mark.parametrize("given", [None, 0.5])
def test_every_fifth_trajectory_takes_smaller_steps_where_they_are_tuned(given, generator):
    density = correlated_gaussian(4)
    target = DensityTarget(density.log_density, Layout.of(density.start()), mode="eager")
    kernel = MCLMCKernel(kn.MCLMC(step_size=given), "identity", WatchedFlow())
    state = kernel.init(target, torch.zeros(3, 4, dtype=torch.float64), generator=generator)
    usual = kernel.tuned(state)["step_size"]
    WatchedFlow.seen.clear()
    kernel.advance(target, state, 10, generator=generator)
    careful = usual if given else usual / 4
    assert WatchedFlow.seen == [careful if number % 5 == 0 else usual for number in range(10)]


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
