"""Tests of where the chains of a network begin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout
from knowable.inference.sampling import sampler as module
from knowable.inference.sampling.sampler import Start, initial_weights, starting_points
from knowable.priors import EmpiricalBayes, Flat
from tests.core.cases import DTYPE, Tied, diagonal_posterior, linear_data, linear_model, mlp

CHAINS = 3
METHOD = kn.MAP()  # for its name in messages and in the identity of checkpoints


@pytest.fixture(autouse=True)
def _short_training(monkeypatch):
    monkeypatch.setattr(module, "_STEPS", 50)


def start_of(kind, model: kn.Model, data, **settings) -> Start:
    return starting_points(METHOD, kind, CHAINS, model, as_data(data, model), **{"seed": 1, **settings})


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
    start = starting_points(METHOD, "prior", 2000, model, as_data(linear_data(), model), seed=0)
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
