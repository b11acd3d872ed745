"""Tests of where the chains of a network begin."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import knowable as kn
from knowable.core.chains.target import DensityTarget
from knowable.core.method import FitJob
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout
from knowable.inference.sampling import initial_positions as module
from knowable.inference.sampling.initial_positions import (
    Start,
    initial_weights,
    near_modes,
    normal_around_mode,
    starting_points,
)
from knowable.priors import EmpiricalBayes, Flat
from knowable.testing.densities import correlated_gaussian, funnel
from tests.core.cases import DTYPE, Tied, diagonal_posterior, linear_data, linear_model, mlp

CHAINS = 3
METHOD = kn.MAP()  # for its name in messages and in the identity of checkpoints


@pytest.fixture(autouse=True)
def _short_training(monkeypatch):
    monkeypatch.setattr(module, "_STEPS", 50)


def start_of(kind, model: kn.Model, data, **settings) -> Start:
    return starting_points(FitJob.of(METHOD, model, data, **{"seed": 1, **settings}), kind, CHAINS)


def model_of(**settings) -> kn.Model:
    return kn.Model(mlp().to(DTYPE), kn.Gaussian(), **settings)


def layout_of(model: kn.Model) -> Layout:
    return Layout.of({name: model.params()[name] for name in model.random_names})


def log_joint(model: kn.Model, start: Start, data) -> Tensor:
    """Of every chain's start."""
    layout, (x, y) = layout_of(model), as_data(data, model).tensors
    params = [{**start.points, **layout.views(each)} for each in start.positions]
    return torch.stack([model.log_joint(each, x, y, len(x)) for each in params])


# --- the kinds of starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ensemble", "map", "prior", "network"])
def test_every_start_has_a_position_for_every_chain_and_repeats_itself(kind):
    model, data = model_of(), linear_data()
    first, second = start_of(kind, model, data), start_of(kind, model, data)
    assert first.positions.shape == (CHAINS, layout_of(model).size)
    assert first.positions.dtype == DTYPE and not first.positions.requires_grad
    assert torch.equal(first.positions, second.positions)


def test_the_networks_own_weights_are_the_same_for_all_chains():
    model = model_of()
    start = start_of("network", model, linear_data())
    expected = layout_of(model).flatten(model.params())
    assert all(torch.equal(each, expected) for each in start.positions)
    start.positions[0] += 1  # each chain has numbers of its own
    assert torch.equal(start.positions[1], expected)


def test_a_trained_network_is_one_for_all_chains_and_better_than_the_network():
    model, data = model_of(), linear_data()
    trained, own = start_of("map", model, data), start_of("network", model, data)
    assert torch.equal(trained.positions[0], trained.positions[1])
    assert (log_joint(model, trained, data) > log_joint(model, own, data)).all()


def test_an_ensemble_is_a_network_for_each_chain_all_better_than_where_they_began():
    model, data = model_of(), linear_data()
    start = start_of("ensemble", model, data)
    begun = Start(initial_weights(model, layout_of(model), CHAINS, 1), {}, {})
    assert (log_joint(model, start, data) > log_joint(model, begun, data)).all()
    assert (torch.pdist(start.positions) > 0.1).all()


def test_draws_from_the_prior_have_its_spread():
    model = model_of(prior=kn.Normal(3.0, loc=1.0))
    start = starting_points(FitJob.of(METHOD, model, linear_data()), "prior", 2000)
    weights = layout_of(model).views(start.positions)["0.weight"]
    assert weights.mean().item() == pytest.approx(1.0, abs=4 * 3 / weights.numel() ** 0.5)
    assert weights.std().item() == pytest.approx(3.0, abs=4 * 3 / (2 * weights.numel()) ** 0.5)


def test_draws_from_an_improper_prior_are_refused():
    model = model_of(prior=Flat())
    with pytest.raises(kn.Unsupported, match="improper"):
        start_of("prior", model, linear_data())


def test_a_posterior_gives_its_draws_points_and_buffers():
    model = model_of(random="last_layer")
    posterior = diagonal_posterior(model)
    start = start_of(posterior, model, linear_data())
    assert start.points.keys() == set(model.point_names)
    assert all(torch.equal(start.points[name], posterior.points[name]) for name in start.points)
    assert len(start.positions.unique(dim=0)) == CHAINS


def test_a_posterior_of_another_network_is_refused():
    posterior = diagonal_posterior(kn.Model(mlp(width=5).to(DTYPE), kn.Gaussian()))
    with pytest.raises(kn.InvalidArgument, match="start is a posterior with shape"):
        start_of(posterior, model_of(), linear_data())
    with pytest.raises(kn.InvalidArgument, match="start is a posterior with nothing for"):
        start_of(diagonal_posterior(linear_model()), model_of(), linear_data())


def test_hyperparameters_of_the_prior_are_refused():
    model = model_of(prior=EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match="cannot learn the prior's own scale"):
        start_of("network", model, linear_data())


@pytest.mark.parametrize("kind", ["ensemble", "map", "prior", "network"])
def test_point_estimates_are_trained_whatever_the_start(kind):
    model, data = model_of(random="last_layer"), linear_data()
    start = start_of(kind, model, data)
    own = model.params()
    assert set(start.points) == set(model.point_names)
    assert any(not torch.equal(start.points[name], own[name]) for name in start.points)


def test_running_statistics_are_those_the_chains_will_see():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE)
    model = kn.Model(net, kn.Gaussian())
    start = start_of("ensemble", model, linear_data())
    assert all(torch.equal(start.buffers[name], value) for name, value in model.buffers().items())


def test_held_out_rows_may_end_the_training_early():
    model, (x, y) = model_of(), linear_data()
    start = start_of("ensemble", model, (x, y), validation=as_data((x, -y), model))
    assert torch.isfinite(start.positions).all()


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ensemble", "map"])
def test_an_interrupt_before_there_are_draws_is_an_interrupt_and_a_second_call_goes_on(kind, tmp_path, monkeypatch):
    model, data = model_of(), linear_data()
    whole = start_of(kind, model, data)
    checkpoint = kn.Checkpoint(tmp_path / "run", seconds=0)
    forward, calls = nn.Module.__call__, []

    def interrupted(self, *arguments):
        calls.append(self)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return forward(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt), pytest.warns(kn.Interrupted):
            start_of(kind, model, data, checkpoint=checkpoint)
    assert torch.equal(start_of(kind, model, data, checkpoint=checkpoint).positions, whole.positions)


# --- the ensemble ----------------------------------------------------------------------------------------------------


def test_members_begin_at_weights_of_their_own():
    model = model_of()
    found = layout_of(model).views(initial_weights(model, layout_of(model), 50, 0))
    weights = found["0.weight"].flatten()
    assert len(weights.unique()) == len(weights)
    assert weights.abs().max() <= 2**-0.5  # a linear layer of 2 inputs begins within 1 / sqrt(2)
    assert weights.std().item() == pytest.approx(2**-0.5 / 3**0.5, rel=0.1)


def test_first_weights_repeat_themselves_and_leave_the_network_and_the_generator_alone():
    model = model_of()
    own = [value.clone() for value in model.net.parameters()]
    before = torch.get_rng_state()
    first, second = (initial_weights(model, layout_of(model), CHAINS, 5) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(own, model.net.parameters(), strict=True))


def test_weights_used_twice_begin_as_one():
    model = kn.Model(Tied().to(DTYPE), kn.Gaussian(0.5))
    assert initial_weights(model, layout_of(model), CHAINS, 0).shape == (CHAINS, layout_of(model).size)


class _Stubborn(nn.Module):
    """A module whose reset needs an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1))

    def reset_parameters(self, scale: float) -> None:
        self.weight.data.fill_(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_parameters_without_a_reset_of_their_own_begin_near_where_they_are():
    model = kn.Model(_Stubborn().to(DTYPE), kn.Gaussian())
    found = layout_of(model).views(initial_weights(model, layout_of(model), 500, 0))
    for name in ("weight", next(name for name in model.params() if name.startswith("likelihood."))):
        away = found[name] - model.params()[name]
        assert away.mean().item() == pytest.approx(0.0, abs=0.02)
        assert away.std().item() == pytest.approx(0.1, rel=0.15)


def test_attention_is_trained_without_a_word_of_slow_loops(monkeypatch):
    monkeypatch.setattr(module, "_STEPS", 5)
    layer = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)
    model = kn.Model(nn.Sequential(layer, nn.Flatten(), nn.Linear(2, 1)).to(DTYPE), kn.Gaussian())
    x, y = linear_data()
    assert torch.isfinite(start_of("ensemble", model, (x.unsqueeze(1), y)).positions).all()


# --- bare densities ---------------------------------------------------------------------------------------------------


MEAN = torch.tensor([-60_000.0, 1250.0, 9.8], dtype=torch.float64)
COVARIANCE = torch.tensor(
    [[8.8e7, -1.325e6, 0.0], [-1.325e6, 2.0e4, 0.0], [0.0, 0.0, 4e-4]], dtype=torch.float64
)  # correlation -0.9987


def raw_scales() -> DensityTarget:
    """A normal as coefficients of raw predictors have it."""
    precision = torch.linalg.inv(COVARIANCE)

    def log_density(params):
        away = params["x"] - MEAN
        return -0.5 * away @ precision @ away

    return DensityTarget(log_density, Layout.of({"x": MEAN}))


def around_zero(chains: int, d: int, generator: torch.Generator) -> torch.Tensor:
    return 2 * torch.rand(chains, d, generator=generator, dtype=torch.float64) - 1


def test_a_normal_is_found_from_far_away_in_any_units(generator):
    normal = normal_around_mode(raw_scales(), around_zero(4, 3, generator), generator=generator)
    assert normal is not None
    torch.testing.assert_close(normal.factor @ normal.factor.T, COVARIANCE, rtol=1e-6, atol=0)
    away = torch.linalg.solve(torch.linalg.cholesky(COVARIANCE), normal.loc - MEAN)
    assert away.norm() < 1e-3


@pytest.mark.slow
def test_chains_begin_as_draws_of_the_student_t_around_it(generator):
    found = near_modes(raw_scales(), around_zero(200, 3, generator), generator=generator)
    white = torch.linalg.solve(torch.linalg.cholesky(COVARIANCE), (found - MEAN).T)
    for coordinate in white:
        assert stats.kstest(coordinate.numpy(), stats.t(5).cdf).pvalue > 1e-5


def test_a_funnel_whose_mode_is_not_where_its_mass_is_is_left_alone(generator):
    density = funnel(10)
    target = DensityTarget(density.log_density, Layout.of(density.start()))
    position = around_zero(4, 10, generator)
    assert normal_around_mode(target, position, generator=generator) is None
    assert torch.equal(near_modes(target, position, generator=generator), position)


def test_every_chain_stays_with_its_own_mode(generator):
    def two(params):  # normals of width 0.1 at -3 and 3
        x = params["x"]
        return torch.logaddexp(-50 * (x - 3).square().sum(), -50 * (x + 3).square().sum())

    target = DensityTarget(two, Layout.of({"x": torch.zeros(2)}))
    sides = torch.tensor([-1.0, 1.0, 1.0, -1.0]).double().unsqueeze(1)
    position = 1.5 * sides.expand(4, 2) + 0.1 * around_zero(4, 2, generator)
    found = near_modes(target, position, generator=generator)
    assert torch.equal(found.mean(1).sign(), sides.squeeze(1))
    assert (found - 3 * sides).abs().max() < 3  # a Student t of scale 0.1 with 5 degrees of freedom


class OnceOnly(torch.autograd.Function):
    """-x²/2, whose gradient has no derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return -0.5 * x.square().sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return -slope * x


def test_densities_that_can_be_differentiated_once_only_are_taken(generator):
    target = DensityTarget(lambda params: OnceOnly.apply(params["x"]), Layout.of({"x": torch.zeros(2)}))
    normal = normal_around_mode(target, around_zero(2, 2, generator), generator=generator)
    assert normal is not None
    torch.testing.assert_close(normal.factor @ normal.factor.T, torch.eye(2, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_start_values_that_are_given_for_every_chain_are_kept(monkeypatch):
    def moved(*_):
        raise AssertionError

    monkeypatch.setattr(kn.HMC, "_scattered", moved)
    density = correlated_gaussian(2)
    sampler = kn.HMC(chains=2, warmup=20, draws=5)
    sampler.sample(density.log_density, [density.start(), density.start()])
    with pytest.raises(AssertionError):
        sampler.sample(density.log_density, density.start())
