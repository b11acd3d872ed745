"""Tests of the microcanonical flow: exact turns, reversibility, order of the energy error."""

from __future__ import annotations

from dataclasses import replace

import torch

from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.mclmc import Isokinetic, Walk, turn, unit
from knowable.inference.sampling.metric import Metric


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
    flow = Isokinetic()
    there = flow.run(target, metric, walk, 0.3, 5)
    back = flow.run(target, metric, replace(there, direction=-there.direction), 0.3, 5)
    torch.testing.assert_close(back.position, walk.position)
    torch.testing.assert_close(back.direction, -walk.direction)
    torch.testing.assert_close(back.energy, torch.zeros_like(back.energy), atol=1e-10, rtol=0)


def test_steps_in_one_go_are_steps_one_by_one(generator):
    target, metric, walk = _walk(generator)
    flow, single = Isokinetic(), walk
    for _ in range(4):
        single = flow.run(target, metric, single, 0.2, 1)
    whole = flow.run(target, metric, walk, 0.2, 4)
    torch.testing.assert_close(whole.position, single.position)
    torch.testing.assert_close(whole.energy, single.energy)


def test_the_energy_error_of_a_step_is_of_third_order(generator):
    target, metric, walk = _walk(generator, chains=400)
    errors = [Isokinetic().run(target, metric, walk, step, 1).energy.square().mean().sqrt() for step in (0.1, 0.05)]
    assert 6 < errors[0] / errors[1] < 11  # 2³
