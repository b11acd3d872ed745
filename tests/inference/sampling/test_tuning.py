"""Dual averaging, the first step size, and where tuning begins."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.core.support.time_limit import time_limit
from knowable.inference.sampling.metric import Metric
from knowable.inference.sampling.tuning import DualAveraging, begin, initial_step_size


def test_a_dense_mass_begins_at_the_curvature_unless_time_is_short(generator):
    start = torch.randn((5, 3), generator=generator, dtype=torch.float64)
    target = DensityTarget(lambda p: -0.5 * (p["x"] / 100).square().sum(), Layout.of({"x": start[0]}))
    eye = torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(begin(target, start, kn.HMC(), "dense", generator=generator)["inverse_mass"], 1e4 * eye)
    with time_limit(10):
        assert torch.equal(begin(target, start, kn.HMC(), "dense", generator=generator)["inverse_mass"], eye)


# --- dual averaging ---------------------------------------------------------------------------------------------------


def acceptance_at(step: float, scale: float) -> float:
    """A known curve that falls from 1 to 0, one half at ``scale``."""
    return 1 / (1 + (step / scale) ** 2)


def tuned_by(curve, first: float, target: float, updates: int) -> DualAveraging:
    state = DualAveraging.begin(first)
    for _ in range(updates):
        state = state.update([curve(state.current)], target)
    return state


@pytest.mark.parametrize("target", [0.4, 0.65, 0.8, 0.95])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("first", [0.01, 1.0, 100.0])
def test_the_step_comes_to_where_the_acceptance_is_the_one_wanted(target, scale, first):
    state = tuned_by(lambda step: acceptance_at(step, scale), first * scale, target, 1000)
    # log(step) = anchor - sqrt(t) / gamma * error: what is left of the error is gamma / sqrt(1000) * log(10^3 / 0.2)
    for step in (state.final, state.current):
        assert acceptance_at(step, scale) == pytest.approx(target, abs=0.015)


def test_noisy_acceptances_come_to_the_one_wanted_and_the_average_is_steadier(generator):
    # acceptances as they come: 0 or 1 with the probability of the curve
    logs, total = [], 0.0
    for _ in range(40):
        state = DualAveraging.begin(1.0)
        for _ in range(400):
            chance = acceptance_at(state.current, 1.0)
            accepted = float(torch.rand((), generator=generator) < chance)
            state = state.update([accepted], 0.8)
            total += accepted
        logs.append([math.log(state.current), math.log(state.final)])
    current, final = torch.tensor(logs).T
    assert final.std() < 0.5 * current.std()
    # the share accepted: what is left of the error (gamma / 20 * log(10 / 0.5)) and four standard errors
    assert abs(total / 16_000 - 0.8) < 0.0075 + 4 * 0.4 / math.sqrt(16_000)


def test_several_acceptances_at_once_are_updates_one_after_the_other():
    one_by_one = DualAveraging.begin(0.3)
    for acceptance in (0.2, 0.9, 0.7):
        one_by_one = one_by_one.update([acceptance], 0.8)
    assert DualAveraging.begin(0.3).update([0.2, 0.9, 0.7], 0.8) == one_by_one


def test_updates_follow_the_papers_formulas():
    gamma, delay, kappa, mu, target = 0.05, 10, 0.75, math.log(10 * 0.3), 0.8
    error, averaged = 0.0, 0.0
    for t, acceptance in enumerate([0.1, 0.5, 1.0, 0.9], start=1):
        error = (1 - 1 / (t + delay)) * error + (target - acceptance) / (t + delay)
        log_step = mu - math.sqrt(t) / gamma * error
        averaged = t**-kappa * log_step + (1 - t**-kappa) * averaged
    state = DualAveraging.begin(0.3).update([0.1, 0.5, 1.0, 0.9], target)
    assert state.current == pytest.approx(math.exp(log_step))
    assert state.final == pytest.approx(math.exp(averaged))


def test_without_an_update_the_first_step_is_used():
    assert DualAveraging.begin(0.3).current == DualAveraging.begin(0.3).final == pytest.approx(0.3)


# --- the first step --------------------------------------------------------------------------------------------------


def first_step(log_density, *, chains: int = 50, dimension: int = 3, at: float = 0.0, mass: float = 1.0) -> float:
    layout = Layout.of({"x": torch.zeros(dimension)})
    position = at + 0.1 * torch.randn(chains, dimension, dtype=torch.float64)
    metric = Metric(torch.full((dimension,), mass, dtype=torch.float64))
    return initial_step_size(
        DensityTarget(log_density, layout), position, metric, generator=torch.Generator().manual_seed(0)
    )


@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 1e2, 1e4])
def test_the_first_step_is_of_the_size_of_the_density(scale):
    found = first_step(lambda p: -0.5 * (p["x"] / scale).square().sum(), at=0.0)
    # a leapfrog step on a normal is stable below twice its scale
    assert 0.1 * scale <= found <= 2.1 * scale


def test_the_first_step_is_in_units_of_the_metric():
    found = first_step(lambda p: -0.5 * (p["x"] / 100).square().sum(), mass=100.0**2)
    assert 0.1 <= found <= 2.1


def test_the_first_step_where_the_density_has_an_edge_or_no_gradient_is_a_number():
    edge = first_step(lambda p: torch.where(p["x"][0] > -0.5, -p["x"].square().sum(), -torch.inf))
    flat = first_step(lambda p: 0.0 * p["x"].sum())
    broken = first_step(lambda p: torch.where(p["x"][0].abs() < 1e-9, p["x"].sum(), math.nan))
    assert all(math.isfinite(each) and each > 0 for each in (edge, flat, broken))
