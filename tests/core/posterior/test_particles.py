"""Tests of posteriors made of atoms."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from tests.core.cases import DTYPE, atoms, batch_norm_net, linear_model, same_params

STACK = {
    "weight": torch.tensor([[[0.0, 0.0]], [[1.0, 2.0]], [[-3.0, 5.0]]], dtype=DTYPE),
    "bias": torch.tensor([[0.0], [1.0], [4.0]], dtype=DTYPE),
}
LOG_WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE).log()


def _particles(log_weights=LOG_WEIGHTS, **common) -> kn.Particles:
    return kn.Particles(linear_model(), STACK, log_weights, **common)


def test_weights_are_normalised_and_equal_by_default():
    torch.testing.assert_close(_particles(LOG_WEIGHTS + 7.0).weights, LOG_WEIGHTS.exp())
    assert _particles(None).weights.tolist() == pytest.approx([1 / 3] * 3)
    assert len(_particles()) == 3


def test_mean_and_spread_are_weighted():
    weights = LOG_WEIGHTS.exp()
    mean = (weights.view(3, 1) * STACK["bias"]).sum(0)
    spread = (weights.view(3, 1) * (STACK["bias"] - mean) ** 2).sum(0).sqrt()
    torch.testing.assert_close(_particles().mean()["bias"], mean)
    torch.testing.assert_close(_particles().std()["bias"], spread)


def test_draws_are_atoms_as_often_as_their_weights_say(generator):
    # a share p of n draws errs by sqrt(p (1 - p) / n): 5 of those
    n = 20_000
    draws = _particles().sample(n, generator)
    for k, weight in enumerate(LOG_WEIGHTS.exp().tolist()):
        is_atom = (draws["weight"] == STACK["weight"][k]).flatten(1).all(1)
        assert torch.equal(draws["bias"][is_atom], STACK["bias"][k].expand(int(is_atom.sum()), 1))
        assert abs(is_atom.double().mean() - weight) < 5 * math.sqrt(weight * (1 - weight) / n)


def test_a_prediction_uses_all_atoms_with_their_weights_where_they_are_few():
    x = torch.tensor([[1.0, 1.0]], dtype=DTYPE)
    prediction = _particles().predict(x)
    outputs = torch.tensor([0.0, 4.0, 6.0], dtype=DTYPE)
    torch.testing.assert_close(prediction.samples.flatten(), outputs)
    torch.testing.assert_close(prediction.log_weights, LOG_WEIGHTS)
    torch.testing.assert_close(prediction.mean.squeeze(), (LOG_WEIGHTS.exp() * outputs).sum())


def test_more_atoms_than_draws_are_resampled_evenly(generator):
    # systematic resampling: an atom of weight w appears floor(K w) or ceil(K w) times
    posterior = atoms(linear_model(), 50, generator)
    samples = 20
    draws = posterior.draw_block(0, samples, samples, seed=3)
    counts = torch.tensor([(draws["bias"] == atom).all(1).sum() for atom in posterior.stack["bias"]])
    wanted = samples * posterior.weights
    assert counts.sum() == samples
    assert ((counts >= wanted.floor()) & (counts <= wanted.ceil())).all()


def test_blocks_of_draws_fit_together(generator):
    posterior = atoms(linear_model(random="weight"), 50, generator)
    whole = posterior.draw_block(0, 20, 20, seed=3)
    parts = [posterior.draw_block(start, start + 5, 20, seed=3) for start in range(0, 20, 5)]
    assert same_params({name: torch.cat([part[name] for part in parts]) for name in whole}, whole)


def test_an_atom_of_weight_zero_never_appears(generator):
    posterior = _particles(torch.tensor([0.0, -math.inf, 0.0], dtype=DTYPE))
    assert posterior.weights.tolist() == [0.5, 0.0, 0.5]
    assert not (posterior.sample(1_000, generator)["bias"] == 1.0).any()
    assert torch.isfinite(posterior.mean()["weight"]).all()


@pytest.mark.parametrize(
    "log_weights", [torch.zeros(2), torch.zeros(3, 1), torch.full((3,), -math.inf), torch.tensor([0.0, math.nan, 0.0])]
)
def test_weights_that_are_not_one_number_for_each_atom_are_refused(log_weights):
    with pytest.raises(kn.InvalidArgument, match="log_weights must be 3 numbers"):
        _particles(log_weights)


def test_one_atom_is_called_a_point_estimate():
    assert "Particles(point estimate, 3 random parameters" in repr(atoms(linear_model(), 1))


def test_atoms_kept_in_short_numbers_are_used_in_the_models_own():
    short = {name: (value + 0.123).bfloat16() for name, value in STACK.items()}
    posterior = kn.Particles(linear_model(), short, LOG_WEIGHTS)
    assert posterior.stack["weight"].dtype == torch.bfloat16
    exact = kn.Particles(linear_model(), {name: value.to(DTYPE) for name, value in short.items()}, LOG_WEIGHTS)
    assert same_params(posterior.mean(), exact.mean())
    assert same_params(posterior.std(), exact.std())
    draws = [each.sample(5, torch.Generator().manual_seed(0)) for each in (posterior, exact)]
    assert same_params(*draws)
    x = torch.randn(4, 2, dtype=DTYPE)
    for samples in (2, 10):
        assert torch.equal(posterior.predict(x, samples=samples).samples, exact.predict(x, samples=samples).samples)


# --- buffers of their own --------------------------------------------------------------------------------------------


def _with_buffers(count: int, generator: torch.Generator) -> kn.Particles:
    model = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1))
    stacks = {"1.running_mean": torch.randn(count, 4, generator=generator, dtype=DTYPE)}
    stacks["1.running_var"] = torch.rand(count, 4, generator=generator, dtype=DTYPE) + 0.1
    plain = atoms(model, count, generator)
    return kn.Particles(model, plain.stack, plain.log_weights, buffer_stack=stacks)


@pytest.mark.parametrize("samples", [20, 4])
@pytest.mark.parametrize("memory", [None, 3_000])
def test_every_atom_predicts_with_its_own_buffers(samples, memory, generator):
    posterior, x = _with_buffers(10, generator), torch.randn(5, 2, generator=generator, dtype=DTYPE)
    prediction = posterior.predict(x, samples=samples, max_memory=memory)
    chosen = posterior._chosen(0, min(10, samples), samples, posterior.seed)
    for found, k in zip(prediction.samples, chosen.tolist(), strict=True):
        params = {name: value[k] for name, value in posterior.stack.items()}
        buffers = {**posterior.buffers, **{name: value[k] for name, value in posterior.buffer_stack.items()}}
        torch.testing.assert_close(found, posterior.model.forward(params, x, buffers=buffers))


def test_buffers_of_atoms_are_saved_and_loaded(tmp_path, generator):
    posterior, x = _with_buffers(3, generator), torch.randn(5, 2, generator=generator, dtype=DTYPE)
    loaded = kn.load(posterior.save(tmp_path))
    assert same_params(loaded.buffer_stack, posterior.buffer_stack)
    assert torch.equal(loaded.predict(x).samples, posterior.predict(x).samples)


def test_buffers_for_another_number_of_atoms_are_refused():
    model = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1))
    with pytest.raises(kn.InvalidArgument, match="buffer_stack must have a leading dimension of 3"):
        kn.Particles(model, atoms(model, 3).stack, buffer_stack={"1.running_mean": torch.zeros(2, 4)})
