"""Parallel tempering: the right weights of far modes, swaps that change no distribution, and the ladder."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.target import DensityTarget
from knowable.core.compiling.engine import Engine
from knowable.core.network.params import Layout
from knowable.errors import ConvergenceWarning, InvalidArgument, InvalidType
from knowable.inference.sampling.hmc import HMC
from knowable.inference.sampling.tempered import TemperedChains, equalised, swaps
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from knowable.testing.targets import LinearGaussian
from tests.core.chain_cases import copied, same_state
from tests.inference.sampling.moments import expect_moments
from tests.inference.sampling.test_metropolis import expect_regression

TRACED = Engine(mode="traced")


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_modes_ten_apart_get_their_weights_where_plain_chains_stay_where_they_began(seed):
    density = bimodal(distance=10.0)
    with pytest.warns(ConvergenceWarning, match="not mixed"):
        plain = HMC(chains=8, draws=100, warmup=100).sample(
            density.log_density, [{"x": torch.tensor([side, 0.0], dtype=torch.float64)} for side in (-5.0, 5.0) * 4]
        )
    sides = plain.draws["x"][..., 0] > 0
    assert (sides == sides[:, :1]).all()
    samples = TemperedChains().sample(density.log_density, density.start(), seed=seed, engine=TRACED)
    assert ((samples.draws["x"][..., 0] > 0).any(1) & (samples.draws["x"][..., 0] < 0).any(1)).all()
    expect_moments(samples, density)
    assert samples.draws["x"].shape[0] == 8
    assert 0 < samples.info["swap"].mean() < 1


@pytest.mark.slow
def test_random_walks_climb_the_ladder_too(seed):
    density = bimodal(distance=10.0)
    samples = TemperedChains(moves="metropolis").sample(density.log_density, density.start(), seed=seed)
    expect_moments(samples, density)


@pytest.mark.slow
def test_draws_have_the_moments_of_fifty_dimensions(seed):
    density = correlated_gaussian(50)
    expect_moments(TemperedChains().sample(density.log_density, density.start(), seed=seed, engine=TRACED), density)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged:knowable.errors.ConvergenceWarning")  # now and then, where it is narrow
def test_draws_have_the_moments_of_a_bent_density(seed):
    density = banana()
    method = TemperedChains(target_acceptance=0.98)
    expect_moments(method.sample(density.log_density, density.start(), seed=seed, engine=TRACED), density)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*diverged:knowable.errors.ConvergenceWarning")
def test_a_hot_funnel_is_all_mouth_so_that_its_ladder_breaks_but_draws_stay_right(seed):
    # p^(1/T) of the funnel has v ~ N((1 - 1/T) T s^2 (d - 1) / 2, T s^2): at T = 10 that is N(40, 22),
    # where no draw at T = 1 is; the cold chains are then plain Hamiltonian ones
    density = funnel()
    method = TemperedChains(target_acceptance=0.98)
    samples = method.sample(density.log_density, density.start(), seed=seed, engine=TRACED)
    assert samples.diagnostics.terms["swap_acceptance"] < 0.1
    expect_moments(samples, density)


def test_a_regression_has_the_exact_posterior(seed):
    problem = LinearGaussian.make()
    method = TemperedChains(chains=6, start="prior", warmup=200)
    expect_regression(method.fit(problem.model(), problem.data, seed=seed, engine=TRACED), problem)


# --- moves and swaps -------------------------------------------------------------------------------------------------


def test_swaps_are_in_detailed_balance_by_enumeration():
    # three points of log density 0, 1.3 and -0.4 on two rungs: pi(a, b) P(a, b -> b, a) = pi(b, a) P(b, a -> a, b)
    points, ladder = torch.tensor([0.0, 1.3, -0.4], dtype=torch.float64), torch.tensor([1.0, 2.5], dtype=torch.float64)
    pairs = [(a, b) for a in range(3) for b in range(3)]
    values = points[torch.tensor(pairs).T]  # (2 rungs, 9 chains)
    _, acceptance = swaps(values, ladder, torch.tensor([0]), torch.zeros(1, 9, dtype=torch.float64))
    joint = (values / ladder.unsqueeze(1)).sum(0).exp()
    flow = dict(zip(pairs, (joint * acceptance[0]).tolist(), strict=True))
    for a, b in pairs:
        assert flow[a, b] == pytest.approx(flow[b, a], rel=1e-12)
    assert acceptance.max() == 1.0
    assert acceptance.min() < 0.7


@pytest.mark.parametrize("first", [0, 1])
def test_swaps_leave_every_rung_its_distribution(first, generator):
    chains = 40_000
    ladder = torch.tensor([1.0, 2.0, 5.0, 6.0], dtype=torch.float64)
    x = torch.randn((4, chains), generator=generator, dtype=torch.float64) * ladder.sqrt().unsqueeze(1)
    lower = torch.arange(first, 3, 2)
    luck = torch.rand((len(lower), chains), generator=generator, dtype=torch.float64)
    order, acceptance = swaps(-0.5 * x.square(), ladder, lower, luck)
    moved = x.flatten()[order]
    assert (moved != x).double().mean() > 0.2
    assert torch.equal(moved.sort(0).values, x.sort(0).values)  # no replica is lost, and all stay with their chain
    assert ((moved.square().mean(1) / ladder - 1).abs() < 4 * math.sqrt(2 / chains)).all()  # Var x^2 = 2 T^2
    assert ((moved.pow(4).mean(1) / ladder**2 - 3).abs() < 4 * math.sqrt(96 / chains)).all()  # Var x^4 = 96 T^4
    assert ((moved[:-1] * moved[1:]).mean(1).abs() < 4 * (ladder[:-1] * ladder[1:] / chains).sqrt()).all()
    assert acceptance.shape == (len(lower), chains)


# --- the ladder ------------------------------------------------------------------------------------------------------


def test_neighbours_that_swap_less_move_together_and_the_ends_stay():
    ladder = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    assert torch.allclose(equalised(ladder, torch.full((3,), 0.3, dtype=torch.float64), 0), ladder)
    found = equalised(ladder, torch.tensor([0.1, 0.3, 0.5], dtype=torch.float64), 0)
    ratios = found[1:] / found[:-1]
    assert ratios[0] < 2 < ratios[2]
    assert found[0] == 1.0
    assert found[-1].item() == pytest.approx(8.0, rel=1e-12)


def test_the_ladder_evens_out_the_rates_of_its_swaps(seed):
    # from a very uneven start on a normal in 10 dimensions, whose best ladder has equal ratios
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn((32, 10), generator=generator, dtype=torch.float64)
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": start[0]}))
    kernel = TemperedChains(rungs=4, hottest=5.0).kernel(10)
    state = kernel.init(target, start, generator=generator)
    state = replace(state, ladder=torch.tensor([1.0, 1.1, 1.3, 5.0], dtype=torch.float64))
    for first in range(0, 300, 50):
        state, _ = kernel.advance(target, state, 50, generator=generator, warmup=WarmUp(first, 300))
    learned = state.ladder.clone()
    assert torch.allclose(learned, 5.0 ** (torch.arange(4) / 3).double(), rtol=0.15)
    state, block = kernel.advance(target, state, 100, generator=generator)
    rates = state.swaps / state.tries
    assert (rates.max() - rates.min()) < 0.15
    assert torch.equal(state.ladder, learned)  # from the first draw on it stays
    assert block.positions.shape == (100, 32, 10)
    assert kernel.tuned(state)["swap_acceptance"] == pytest.approx(rates.min().item())


def test_a_ladder_that_is_given_stays_as_it_is(seed):
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn((4, 2), generator=generator, dtype=torch.float64)
    target = DensityTarget(lambda p: -0.5 * p["x"].square().sum(), Layout.of({"x": start[0]}))
    kernel = TemperedChains(temperatures=(1.0, 1.5, 7.0)).kernel(2)
    state = kernel.init(target, start, generator=generator)
    untouched = copied(state)
    after, _ = kernel.advance(target, state, 40, generator=generator, warmup=WarmUp(0, 100))
    assert after.ladder.tolist() == [1.0, 1.5, 7.0]
    assert same_state(state, untouched)  # nothing changed in place


def test_more_dimensions_get_more_rungs():
    counts = [len(TemperedChains().ladder(d)) for d in (1, 20, 50, 5000)]
    assert counts == [4, 8, 11, 12]
    ladder = TemperedChains(rungs=5, hottest=16.0).ladder(3)
    assert ladder == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"temperatures": (1.0, 3.0, 2.0)}, InvalidArgument),
        ({"temperatures": (2.0, 3.0)}, InvalidArgument),
        ({"temperatures": (1.0,)}, InvalidArgument),
        ({"temperatures": 3.0}, InvalidType),
        ({"hottest": 1.0}, InvalidArgument),
        ({"rungs": 1}, InvalidArgument),
        ({"moves": "gibbs"}, InvalidArgument),
        ({"mass": "identity"}, InvalidArgument),
    ],
)
def test_settings_that_make_no_sense_are_refused(bad, error):
    with pytest.raises(error, match=next(iter(bad))):
        TemperedChains(**bad)
