"""Tests of Hamiltonian Monte Carlo."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.posterior import Samples
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.hmc import HMC, TrajectoryLength, halton, leapfrog, trajectory
from knowable.inference.sampling.metric import Metric, MetricState, Window
from knowable.testing.densities import Density, banana, bimodal, correlated_gaussian, funnel
from knowable.testing.targets import LinearGaussian
from tests.core.chain_cases import copied, same_state
from tests.inference.sampling.moments import expect_moments

DTYPE = torch.float64


def target_of(density: Density) -> DensityTarget:
    return DensityTarget(density.log_density, Layout.of({"x": torch.zeros(len(density.mean))}))


def state_at(target: DensityTarget, position: Tensor) -> MetricState:
    value, gradient = target.value_and_grad(position)
    return MetricState(position, value, gradient, torch.ones(position.shape[1]), Window.open(position, dense=False))


def metric_of(kind: str, dimension: int) -> Metric:
    """A metric that is not the identity."""
    factor = torch.randn(dimension, dimension, dtype=DTYPE)
    covariance = factor @ factor.T / dimension + 0.5 * torch.eye(dimension, dtype=DTYPE)
    return Metric(covariance if kind == "dense" else covariance.diagonal().clone())


def sample(method: HMC, density: Density, *, seed: int = 0, dtype: torch.dtype = DTYPE):
    return method.sample(density.log_density, {"x": torch.zeros(len(density.mean), dtype=dtype)}, seed=seed)


# --- the trajectory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_a_trajectory_followed_back_ends_where_it_began(kind):
    density, step, count = banana(), 0.05, 20
    target, metric = target_of(density), metric_of(kind, 2)
    position = density.draw(6, torch.Generator().manual_seed(0))
    noise = torch.randn(6, 2, dtype=DTYPE)
    there = trajectory(target, metric, state_at(target, position), noise, step, count)
    # momentum at the end from its velocity Σ p; back with -p, which needs the noise that makes it
    end = there.velocity @ torch.linalg.inv(metric.inverse_mass) if metric.dense else (
        there.velocity / metric.inverse_mass
    )  # fmt: skip
    noise_back = -end @ metric.factor if metric.dense else -end * metric.factor
    back = trajectory(target, metric, state_at(target, there.position), noise_back, step, count)
    torch.testing.assert_close(back.position, position, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(back.velocity, -metric.velocity(metric.momentum(noise)), rtol=1e-8, atol=1e-8)
    # and the ratio of acceptances is that of the densities: detailed balance
    forth, home = there.acceptance.log(), back.acceptance.log()
    change = there.energy - back.energy
    torch.testing.assert_close(forth - home, change, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", ["diagonal", "dense"])
def test_the_energy_error_falls_with_the_square_of_the_step(kind):
    density = banana()
    target, metric = target_of(density), metric_of(kind, 2)
    position = density.draw(200, torch.Generator().manual_seed(0))
    noise = torch.randn(200, 2, dtype=DTYPE)
    errors = []
    for halvings in range(3):
        step, count = 0.04 / 2**halvings, 10 * 2**halvings
        found = trajectory(target, metric, state_at(target, position), noise, step, count)
        end = metric.kinetic(_momentum(metric, found.velocity)) - found.value
        errors.append((end - found.energy).abs().median().item())
    # halving the step divides the error by four, up to terms of the next order
    assert errors[0] / errors[1] == pytest.approx(4.0, rel=0.15)
    assert errors[1] / errors[2] == pytest.approx(4.0, rel=0.08)


def _momentum(metric: Metric, velocity: Tensor) -> Tensor:
    return velocity @ torch.linalg.inv(metric.inverse_mass) if metric.dense else velocity / metric.inverse_mass


def test_a_leapfrog_step_on_a_normal_is_the_known_matrix():
    # q' = (1 - e²/2) q + e p,  p' = (1 - e²/2) p - e (1 - e²/4) q
    target, step = target_of(bimodal(1, distance=0.0)), 0.3
    position, noise = torch.randn(5, 1, dtype=DTYPE), torch.randn(5, 1, dtype=DTYPE)
    found = trajectory(target, Metric(torch.ones(1, dtype=DTYPE)), state_at(target, position), noise, step, 1)
    half = 1 - step**2 / 2
    torch.testing.assert_close(found.position, half * position + step * noise)
    torch.testing.assert_close(found.velocity, half * noise - step * (1 - step**2 / 4) * position)


def test_trajectories_that_leave_the_numbers_or_the_support_are_rejected_and_called_diverging():
    def edge(p):
        return torch.where(p["x"][0] < 1.0, -0.5 * p["x"].square().sum(), -torch.inf)

    target = DensityTarget(edge, Layout.of({"x": torch.zeros(2)}))
    position = torch.tensor([[0.0, 0.0], [0.9, 0.0]], dtype=DTYPE)
    noise = torch.tensor([[-1.0, 0.0], [5.0, 0.0]], dtype=DTYPE)
    found = trajectory(target, Metric(torch.ones(2, dtype=DTYPE)), state_at(target, position), noise, 0.1, 2)
    assert found.diverging.tolist() == [False, True]
    assert found.acceptance[1] == 0 and torch.equal(found.position[1], position[1])
    assert all(torch.isfinite(value).all() for value in vars(found).values() if value.is_floating_point())


# --- the kernel ------------------------------------------------------------------------------------------------------


def advanced(kernel, target, state, n, *, seed=0, warmup=None):
    return kernel.advance(target, state, n, generator=torch.Generator().manual_seed(seed), warmup=warmup)


@pytest.mark.parametrize("warmup", [None, WarmUp(0, 100)], ids=["drawing", "warming"])
def test_advancing_leaves_the_state_it_was_given_and_repeats_itself(warmup):
    density = banana()
    target, kernel = target_of(density), HMC().kernel(2)
    position = density.draw(4, torch.Generator().manual_seed(0))
    state = kernel.init(target, position, generator=torch.Generator().manual_seed(0))
    kept = copied(state)
    first, block = advanced(kernel, target, state, 40, warmup=warmup)
    assert same_state(state, kept)
    again, repeated = advanced(kernel, target, state, 40, warmup=warmup)
    assert torch.equal(block.positions, repeated.positions)
    assert same_state(first, again)


@pytest.mark.parametrize("total", [0, 60])
def test_two_advances_are_one(total):
    density = banana()
    target, kernel = target_of(density), HMC().kernel(2)
    state = kernel.init(target, density.draw(4, torch.Generator().manual_seed(0)), generator=torch.Generator())

    def warm(first: int) -> WarmUp | None:
        return WarmUp(first, total) if total else None

    generator = torch.Generator().manual_seed(1)
    whole, block = kernel.advance(target, state, 60, generator=generator, warmup=warm(0))
    generator = torch.Generator().manual_seed(1)
    parts, done, current = [], 0, state
    for n in (7, 33, 20):
        current, part = kernel.advance(target, current, n, generator=generator, warmup=warm(done))
        parts.append(part.positions)
        done += n
    assert torch.equal(torch.cat(parts), block.positions)
    assert same_state(whole, current)


def test_values_and_gradients_of_the_state_belong_to_its_position():
    density = banana()
    target, kernel = target_of(density), HMC(step_size=0.6, steps=5).kernel(2)
    state = kernel.init(target, density.draw(8, torch.Generator().manual_seed(0)), generator=torch.Generator())
    state, block = advanced(kernel, target, state, 20)
    assert 0.05 < block.info.acceptance.mean() < 0.95, "some are accepted and some are not"
    value, gradient = target.value_and_grad(state.position)
    torch.testing.assert_close(state.value, value)
    torch.testing.assert_close(state.gradient, gradient)
    torch.testing.assert_close(block.values[-1], value)


def test_a_fixed_step_and_number_of_steps_are_used():
    density = correlated_gaussian(3)
    target, kernel = target_of(density), HMC(step_size=0.1, steps=3, jitter=False).kernel(3)
    state = kernel.init(target, density.draw(4, torch.Generator().manual_seed(0)), generator=torch.Generator())
    state, block = advanced(kernel, target, state, 10, warmup=WarmUp(0, 10))
    assert (block.info.steps == 3).all()
    assert kernel.tuned(state) == {"step_size": 0.1, "trajectory_steps": 3.0}


def test_jittered_numbers_of_steps_have_the_mean_asked_for():
    density = correlated_gaussian(2)
    target, kernel = target_of(density), HMC(step_size=0.01, steps=10).kernel(2)
    state = kernel.init(target, density.draw(2, torch.Generator().manual_seed(0)), generator=torch.Generator())
    _, block = advanced(kernel, target, state, 63)
    counts = block.info.steps[:, 0]
    # the Halton points k/64 times 20, rounded up: from 1 to 20, on average half a step above 10
    assert counts.min() == 1 and counts.max() == 20
    assert counts.mean() == pytest.approx(10.5, abs=0.1)


# --- the law ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mass", ["identity", "diagonal", "dense"])
def test_a_kernel_leaves_its_density_as_it_is(mass, seed):
    # exact draws go in, one transition each; what comes out must have the same moments. 20,000 independent chains.
    density = banana()
    generator = torch.Generator().manual_seed(seed)
    target, kernel = target_of(density), HMC(step_size=0.8, steps=4, mass=mass).kernel(2)
    state = kernel.init(target, density.draw(20_000, generator), generator=generator)
    if mass == "dense":
        state = replace(state, inverse_mass=torch.tensor([[1.0, 0.5], [0.5, 2.0]], dtype=DTYPE))
    elif mass == "diagonal":
        state = replace(state, inverse_mass=torch.tensor([0.5, 2.0], dtype=DTYPE))
    state, block = kernel.advance(target, state, 3, generator=generator)
    assert block.info.acceptance.mean() < 0.9, "a rule that accepts all would pass unseen"
    exact = density.draw(20_000, generator)
    found = state.position
    for moment in (lambda x: x, lambda x: x.square(), lambda x: x[:, :1] * x[:, 1:], lambda x: (x > 0).double()):
        a, b = moment(found), moment(exact)
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 4.5 * error).all()


@pytest.mark.parametrize(
    "density",
    [
        correlated_gaussian(20),
        *(pytest.param(each, marks=pytest.mark.slow) for each in (banana(), bimodal(distance=3.0))),
    ],
    ids=lambda d: d.name,
)
def test_draws_have_the_moments_of_the_density(density, seed):
    expect_moments(sample(HMC(), density, seed=seed), density)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-3, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_scale_in_any_precision_needs_no_tuning(scale, dtype, seed):
    covariance = scale**2 * torch.eye(4, dtype=DTYPE)
    density = Density(
        "scaled", lambda p: -0.5 * (p["x"] / scale).square().sum(),
        lambda n, g: scale * torch.randn((n, 4), generator=g, dtype=DTYPE), torch.zeros(4, dtype=DTYPE), covariance,
    )  # fmt: skip
    found = sample(HMC(chains=8, draws=300), density, seed=seed, dtype=dtype)
    assert found.draws["x"].dtype == dtype
    expect_moments(found, density)
    assert found.diagnostics["acceptance"] > 0.6


def test_a_temperature_widens_the_density(seed):
    wide = sample(HMC(chains=8, draws=500, temperature=4.0), correlated_gaussian(2), seed=seed)
    density = correlated_gaussian(2)
    warm = Density(
        "warm", density.log_density, lambda n, g: 2 * density.draw(n, g), density.mean, 4 * density.covariance
    )
    expect_moments(wide, warm)
    assert any("temperature" in note for note in wide.diagnostics.notes)


def test_parameters_of_any_shape_are_drawn(seed):
    def log_density(p):
        return -0.5 * (p["matrix"] - 1).square().sum() - 0.5 * (p["scalar"] / 3).square() - p["empty"].sum()

    start = {"matrix": torch.zeros(2, 3), "scalar": torch.zeros(()), "empty": torch.zeros(0, 2)}
    found = HMC(chains=4, draws=400).sample(log_density, start, seed=seed)
    assert {name: tuple(v.shape[2:]) for name, v in found.draws.items()} == {
        "matrix": (2, 3),
        "scalar": (),
        "empty": (0, 2),
    }
    # 1600 draws worth several hundred each: 0.2 is four standard errors of a mean
    assert (found.mean()["matrix"] - 1).abs().max() < 0.25
    assert found.std()["scalar"].item() == pytest.approx(3.0, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mass", "density"),
    [
        ("identity", banana()), ("identity", funnel(scale=1.0)), ("diagonal", correlated_gaussian(50)),
        ("diagonal", funnel(scale=1.0)), ("dense", correlated_gaussian(50)), ("dense", banana()),
    ],
    ids=lambda each: getattr(each, "name", each),
)  # fmt: skip
def test_every_metric_draws_two_densities(mass, density, seed):
    expect_moments(sample(HMC(mass=mass), density, seed=seed), density)


def test_a_linear_model_has_the_exact_posterior(seed):
    problem = LinearGaussian.make(40, 3, seed=seed)
    model = problem.model()
    posterior = HMC(chains=8, draws=400, warmup=300, start="prior").fit(model, problem.data, seed=seed)
    draws = problem.as_flat(posterior.stack).unflatten(0, (8, -1))  # (chains, draws, D)
    factor = torch.linalg.cholesky(problem.covariance)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        return problem.mean + torch.randn((n, 4), generator=generator, dtype=DTYPE) @ factor.T

    exact = Density("posterior", lambda p: p["x"].sum(), draw, problem.mean, problem.covariance)
    found = Samples({"x": draws}, torch.zeros(draws.shape[:2]), ChainDiagnostics.of({"x": draws}))
    expect_moments(found, exact)


# --- tuning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0.6, 0.8, 0.95])
def test_the_acceptance_is_about_the_one_wanted(wanted):
    found = sample(HMC(chains=8, draws=300, target_acceptance=wanted), correlated_gaussian(10))
    usual = found.info["acceptance"][:, torch.arange(300) % 5 != 0]  # every fifth has a quarter of the step
    harmonic = (1 / usual.clamp_min(1e-3)).mean(0).reciprocal().mean().item()
    # the step is averaged on the log scale over a noisy path, which makes it a little careful
    assert wanted - 0.08 < harmonic < wanted + 0.2


def test_the_metric_finds_the_scales():
    density = correlated_gaussian(5, correlation=0.5, ratio=100.0)
    target, kernel = target_of(density), HMC(mass="diagonal").kernel(5)
    generator = torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.zeros(16, 5, dtype=DTYPE), generator=generator)
    state, _ = kernel.advance(target, state, 400, generator=generator, warmup=WarmUp(0, 400))
    ratio = state.inverse_mass / density.covariance.diagonal()
    assert ratio.min() > 0.5 and ratio.max() < 2.0


@pytest.mark.parametrize("warmup", [0, 1, 5, 20, 30, 50, 100])
def test_a_short_warm_up_still_gives_chains_that_move(warmup):
    found = sample(HMC(chains=8, draws=50, warmup=warmup), correlated_gaussian(10))
    assert found.diagnostics["acceptance"] > 0.3
    assert found.diagnostics["divergences"] == 0


def test_trajectories_are_not_much_longer_than_they_need_to_be():
    # a normal in its own metric: a quarter of a period is 1.6, and so is a trajectory that forgets where it began
    found = sample(HMC(chains=8, draws=200), correlated_gaussian(10))
    assert found.diagnostics["trajectory_steps"] * found.diagnostics["step_size"] < 8


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"step_size": 0}, {"step_size": -1.0}, {"step_size": math.nan}, {"steps": 0}, {"steps": 1.5}, {"mass": "full"},
     {"target_acceptance": 0.0}, {"target_acceptance": 1.0}, {"jitter": "no"}, {"chains": 0}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(kn.KnowableError, match=next(iter(wrong))):
        HMC(**wrong)


def test_its_text_has_what_was_changed():
    assert repr(HMC(chains=4, mass="dense")) == "HMC(chains=4, mass='dense')"


# --- networks --------------------------------------------------------------------------------------------------------


def test_a_network_is_fitted_and_predicts(monkeypatch):
    monkeypatch.setattr("knowable.inference.sampling.initial_positions._STEPS", 300)
    x = torch.linspace(-2, 2, 30).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * torch.randn(30, 1)
    model = kn.Model(nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)), kn.Gaussian(0.1))
    posterior = HMC(chains=2, draws=50, warmup=50, steps=20).fit(model, (x, y))
    error = (posterior.predict(x).mean - torch.sin(2 * x)).square().mean().sqrt()
    assert error < 0.15
    assert posterior.predict(torch.tensor([[6.0]])).epistemic > 2 * posterior.predict(x).epistemic.mean()


# --- the leapfrog -----------------------------------------------------------------------------------------------------


def test_a_leapfrog_step_is_reversible_and_nearly_conserves_energy(generator):
    q, p = (torch.randn((5, 3), generator=generator, dtype=torch.float64) for _ in range(2))
    mass, step = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.full((5, 1), 0.1, dtype=torch.float64)

    def leap(q, p, step):
        return leapfrog(lambda q: (-0.5 * q.square().sum(1), -q), q, p, -q, step, mass)[:2]

    there = leap(q, p, step)
    back = leap(*there, -step)
    torch.testing.assert_close(back[0], q)
    torch.testing.assert_close(back[1], p)

    def energy(q, p):
        return 0.5 * (q.square() + mass * p.square()).sum(1)

    errors = [(energy(*leap(q, p, each * step)) - energy(q, p)).abs().mean() for each in (1.0, 0.5)]
    assert 5 < errors[0] / errors[1] < 12  # third order for one step: a factor of 8


# --- the trajectory length --------------------------------------------------------------------------------------------


def _tuned_length(first: float, seed: int, *, updates: int = 1500, d: int = 4) -> float:
    """The length found for a standard normal, whose trajectories are known: x cos t + p sin t."""
    generator = torch.Generator().manual_seed(seed)
    state = TrajectoryLength.begin(first)
    for number in range(updates):
        share = halton(number + 1)
        time = 2 * share * state.current
        x, p = (torch.randn((16, d), generator=generator, dtype=torch.float64) for _ in range(2))
        after, velocity = x * math.cos(time) + p * math.sin(time), p * math.cos(time) - x * math.sin(time)
        one = torch.ones(16, dtype=torch.float64)
        state = state.update(x, after, velocity, one, share=share, step=0.02)
    return state.final


@pytest.mark.parametrize("first", [0.1, 1.0, 8.0])
def test_from_anywhere_the_best_length_for_its_cost_is_found(first, seed):
    # E[C] over t in (0, 2T) is proportional to 1 - sin(4T) / (4T); the best T of that divided by T:
    grid = torch.linspace(0.05, 6, 20_000, dtype=torch.float64)
    best = grid[((1 - (4 * grid).sin() / (4 * grid)) / grid).argmax()].item()
    assert abs(math.log(_tuned_length(first, seed) / best)) < math.log(1.35)


def test_lengths_stay_between_one_step_and_a_few_hundred():
    still = torch.zeros((3, 2), dtype=torch.float64)
    state = TrajectoryLength.begin(1e-9)
    state = state.update(still, still, still, torch.ones(3), share=0.5, step=0.1)
    assert state.current == pytest.approx(0.1)
    state = TrajectoryLength.begin(1e9).update(still, still, still, torch.ones(3), share=0.5, step=0.1)
    assert state.current == pytest.approx(50.0)


def test_shares_are_spread_evenly():
    found = torch.tensor([halton(number) for number in range(1, 2**8)])
    assert len(found.unique()) == len(found)
    torch.testing.assert_close(found.sort().values, torch.arange(1, 2**8) / 2**8)
