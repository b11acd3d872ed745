"""Simulated annealing: the mode it ends at, the draws it takes on the way, and the temperatures between."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.target import DensityTarget
from knowable.core.compiling.engine import Engine
from knowable.core.network.params import Layout
from knowable.errors import ConvergenceWarning, InvalidArgument
from knowable.inference.sampling.simulated_annealing import SCHEDULES, SimulatedAnnealing, temperature_at
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from knowable.testing.targets import LinearGaussian
from tests.inference.sampling.moments import expect_moments
from tests.inference.sampling.test_metropolis import expect_regression

TRACED = Engine(mode="traced")


def wells(params):
    """Rastrigin's function: a mode near every point of a grid, the highest at 0."""
    x = params["x"]
    return -(0.1 * x.square() + 2 * (1 - torch.cos(2 * math.pi * x))).sum()


def ascent(log_density, x: torch.Tensor) -> torch.Tensor:
    """Where plain gradient ascent in small steps leads."""
    slope = torch.func.grad(lambda x: log_density({"x": x}))
    for _ in range(500):
        x = x + 0.01 * slope(x)
    return x


# --- the mode --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning")  # to find the mode, chains need not mix
@pytest.mark.parametrize("moves", ["hmc", "metropolis"])
def test_the_highest_of_many_modes_is_found_where_plain_ascent_stays_in_the_nearest(moves, seed):
    start = torch.tensor([4.0, -4.0], dtype=torch.float64)
    stays = ascent(wells, start)
    assert (stays - start).abs().max() < 0.2
    method = SimulatedAnnealing(moves=moves, draws=50, warmup=400)
    samples = method.sample(wells, [{"x": start}] * 16, seed=seed, engine=TRACED)
    assert samples.best is not None
    # the curvature at 0 is -80: at the last temperature, 1e-12, the spread is 1e-7
    assert samples.best["x"].abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning")
def test_the_mode_of_a_tilted_double_well_is_the_root_of_its_slope(seed):
    # d/dx [-(x^2 - 4)^2 / 4 - x / 2] = -(x^3 - 4 x + 1 / 2); the mode on the left is 2 nats the higher
    def log_density(params):
        return (-(params["x"].square() - 4).square() / 4 - params["x"] / 2).sum()

    start = torch.tensor([2.5], dtype=torch.float64)
    left, _, right = sorted(np.roots([1.0, 0.0, -4.0, 0.5]).real)
    assert ascent(log_density, start).item() == pytest.approx(right, abs=1e-6)
    samples = SimulatedAnnealing(draws=50, warmup=300).sample(log_density, {"x": start}, seed=seed, engine=TRACED)
    assert samples.best is not None
    assert samples.best["x"].item() == pytest.approx(left, abs=1e-6)


@pytest.mark.parametrize(
    ("moves", "tolerance"), [("hmc", 1e-4), pytest.param("metropolis", 1e-2, marks=pytest.mark.slow)]
)
def test_the_best_weights_of_a_regression_are_its_posterior_mean(moves, tolerance, seed):
    problem = LinearGaussian.make()
    method = SimulatedAnnealing(moves=moves, chains=8, start="prior", warmup=400)
    posterior = method.fit(problem.model(), problem.data, seed=seed, engine=TRACED)
    assert posterior.best is not None
    away = (problem.as_flat(posterior.best) - problem.mean) / problem.covariance.diagonal().sqrt()
    assert away.abs().max() < tolerance
    expect_regression(posterior, problem)


def test_single_precision_finds_the_mode_as_far_as_its_numbers_tell(seed):
    # differences of log densities drown in rounding below 4 eps |log p|: some 1e-5, or sqrt(2e-5) sds from the mode
    density = correlated_gaussian(3)
    method = SimulatedAnnealing(chains=8, warmup=400)
    samples = method.sample(density.log_density, {"x": torch.zeros(3)}, seed=seed, engine=TRACED)
    assert samples.best is not None
    assert samples.best["x"].dtype == torch.float32
    assert (samples.best["x"].double() / density.covariance.diagonal().sqrt()).abs().max() < 0.02


# --- the draws -------------------------------------------------------------------------------------------------------


def test_draws_have_the_moments_of_the_density(seed):
    density = correlated_gaussian(10)
    expect_moments(SimulatedAnnealing().sample(density.log_density, density.start(), seed=seed, engine=TRACED), density)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moves", "density"),
    [("hmc", correlated_gaussian(50)), ("metropolis", bimodal())],
    ids=lambda each: getattr(each, "name", each),
)
def test_draws_of_both_moves_have_the_moments_of_the_density(moves, density, seed):
    samples = SimulatedAnnealing(moves=moves).sample(density.log_density, density.start(), seed=seed, engine=TRACED)
    expect_moments(samples, density)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged:knowable.errors.ConvergenceWarning")  # now and then, where it is narrow
@pytest.mark.parametrize("density", [banana(), funnel()], ids=lambda each: each.name)
def test_draws_have_the_moments_of_bent_densities(density, seed):
    method = SimulatedAnnealing(target_acceptance=0.98)
    expect_moments(method.sample(density.log_density, density.start(), seed=seed, engine=TRACED), density)


@pytest.mark.slow
def test_modes_too_far_apart_to_cross_at_temperature_one_are_reported(seed):
    density = bimodal(distance=12.0)
    with pytest.warns(ConvergenceWarning, match="not mixed"):
        SimulatedAnnealing(draws=500).sample(density.log_density, density.start(), seed=seed, engine=TRACED)


# --- temperatures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_temperatures_fall_from_the_hottest_to_one(schedule):
    found = [temperature_at(k / 100, 20.0, schedule, 100) for k in range(101)]
    assert found[0] == pytest.approx(20.0)
    assert found[-1] == pytest.approx(1.0)
    assert all(a > b for a, b in pairwise(found))


def test_schedules_are_what_their_names_say():
    k, hottest = 30, 20.0
    geometric, linear, logarithmic = (temperature_at(k / 100, hottest, each, 100) for each in SCHEDULES)
    assert geometric == pytest.approx(20.0 * (1 / 20.0) ** 0.3)
    assert linear == pytest.approx(20.0 - 19.0 * 0.3)
    assert 1 / logarithmic == pytest.approx(1 / 20 + (1 - 1 / 20) * math.log(31) / math.log(101))


def test_hot_chains_have_the_hot_spread_and_the_target_keeps_its_temperature(seed):
    # of a normal, at the beginning of a very slow cooling and after it: the variance is T
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn((4000, 1), generator=generator, dtype=torch.float64)
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": start[0]}))
    kernel = SimulatedAnnealing(hottest=9.0, schedule="linear").kernel(1)
    state = kernel.init(target, start, generator=generator)
    state, _ = kernel.advance(target, state, 20, generator=generator, warmup=WarmUp(0, 100_000))
    assert state.temperature == pytest.approx(9.0, rel=1e-2)
    # E x^2 = 9 with standard error 9 sqrt(2 / 4000); 1% for the temperature
    assert state.position.square().mean().item() == pytest.approx(9.0, abs=4 * 9 * math.sqrt(2 / 4000) + 0.09)
    assert target.temperature == 1.0
    state, _ = kernel.advance(target, state, 20, generator=generator, warmup=WarmUp(99_000, 100_000))
    assert state.temperature == 1.0
    assert state.position.square().mean().item() == pytest.approx(1.0, abs=4 * math.sqrt(2 / 4000))


@pytest.mark.parametrize(
    "bad", [{"hottest": 0.5}, {"schedule": "sudden"}, {"moves": "nuts"}, {"mass": "identity"}, {"steps": 0}]
)
def test_settings_that_make_no_sense_are_refused(bad):
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        SimulatedAnnealing(**bad)
