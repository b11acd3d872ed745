from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from knowable.errors import InvalidArgument
from knowable.inference.sampling import CyclicalSGMCMC
from knowable.inference.sampling.cyclical import draw_stops, exploration_steps, height
from knowable.testing.densities import correlated_gaussian
from tests.inference.sampling.gaussian_targets import Gaussian, expect_variance
from tests.inference.sampling.moments import limit, z_scores


def test_step_falls_along_a_cosine_from_the_top_to_zero():
    assert [height(r) for r in (0.0, 0.5, 1.0)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("draws", [1, 2, 5])
def test_draws_come_from_the_second_half_of_the_sampling_time_and_the_last_at_the_end(draws):
    cycle = CyclicalSGMCMC(cycle_steps=200, proportion=0.4, draws_per_cycle=draws)
    stops = draw_stops(cycle)
    times = [height((k + 0.5) / 200) for k in range(80, 200)]
    shares = [sum(times[: stop - 80]) / sum(times) for stop in stops]
    assert exploration_steps(cycle) == 80 and stops[-1] == 200 and len(stops) == draws
    expected = [1.0] if draws == 1 else [0.5 * (1 + k / (draws - 1)) for k in range(draws)]
    assert shares == pytest.approx(expected, abs=max(times) / sum(times))


def test_transitions_walk_through_the_cycle_and_every_cycle_is_alike():
    sampler = CyclicalSGMCMC(cycle_steps=60, draws_per_cycle=3, step_size=0.1)
    kernel, generator = sampler.kernel(1), torch.Generator().manual_seed(0)
    target = Gaussian([1.0])
    state = kernel.init(target, torch.zeros(2, 1, dtype=torch.float64), generator=generator)
    _, block = kernel.advance(target, state, 6, generator=generator)
    taken = block.info.steps[:, 0].tolist()
    stops = draw_stops(sampler)
    assert taken == [stops[0], stops[1] - stops[0], 60 - stops[1]] * 2


def test_without_noise_explorations_climb_to_the_mode_and_draws_spread_again(seed):
    # a recursion of the variance through the very steps of the cycle, v' = (1 - eps / 2)^2 v + eps * noise, from 1
    sampler = CyclicalSGMCMC(cycle_steps=60, draws_per_cycle=2, step_size=0.3, exploration_noise=0.0)
    kernel, generator = sampler.kernel(1), torch.Generator().manual_seed(0)
    target = Gaussian([1.0])
    state = kernel.init(target, torch.randn(20_000, 1, dtype=torch.float64), generator=generator)
    expected, found = 1.0, []
    for number in range(2):
        for count, factor, noise in kernel.plan(replace(state, drawn=number)):
            for _ in range(count):
                expected = (1 - 0.15 * factor) ** 2 * expected + 0.3 * factor * noise
        state, _ = kernel.advance(target, state, 1, generator=generator)
        found.append(expected)
        expect_variance(state.position.var(0), torch.tensor([expected]))
    time = 0.3 * sum(height((k + 0.5) / 60) for k in range(30, 60))
    # 1 - e^-t of the variance at time t, to the size of a step, and what the exploration left of it is less than 1%
    assert found[-1] == pytest.approx(1 - math.exp(-time), abs=0.05)


@pytest.mark.slow
def test_number_of_cycles_sets_the_number_of_draws(seed):
    density = correlated_gaussian(3)
    sampler = CyclicalSGMCMC(chains=16, cycles=150, cycle_steps=60, draws_per_cycle=2, warmup=200)
    samples = sampler.sample(density.log_density, density.start(), seed=seed)
    assert samples.draws["x"].shape == (16, 300, 3)
    scores = z_scores(samples.draws["x"], density)
    most = limit(sum(map(len, scores.values())))
    assert (scores["mean"].abs() < most).all()
    # as SGLD's, less than 2.6% of the variance, whose standard error is at least sqrt(2 / S)
    assert (scores["variance"].abs() < most + 0.026 / (2 / (16 * 300)) ** 0.5).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("cycles", 0), ("cycle_steps", 3), ("proportion", 0.95), ("draws_per_cycle", 0), ("exploration_noise", 2.0)],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidArgument, match=field):
        CyclicalSGMCMC(**{field: value})
