"""Tests of what every posterior does, on the families of core."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.posterior.diagnostics import NOT_BAYES
from tests.core.cases import (
    DTYPE,
    atoms,
    batch_norm_net,
    diagonal_posterior,
    full_posterior,
    linear_data,
    linear_model,
    same_params,
)

FAMILIES = {
    "particles": lambda model, generator=None, **common: atoms(model, 5, generator, **common),
    "diagonal": diagonal_posterior,
    "full": full_posterior,
}


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request):
    return request.param


def test_draws_have_every_parameter_in_the_models_order_with_a_leading_dimension(family, generator):
    model = linear_model(noise=None, random="weight")
    draws = family(model, generator).sample(7, generator)
    assert list(draws) == list(model.params())
    assert {name: value.shape for name, value in draws.items()} == {
        name: (7, *value.shape) for name, value in model.params().items()
    }


def test_points_are_the_same_in_every_draw_and_have_no_spread(family, generator):
    posterior = family(linear_model(random="weight"), generator)
    bias = posterior.points["bias"]
    assert torch.equal(posterior.sample(3)["bias"], bias.expand(3, 1))
    assert torch.equal(posterior.mean()["bias"], bias)
    assert torch.equal(posterior.std()["bias"], torch.zeros(1, dtype=DTYPE))


def test_mean_and_spread_are_those_of_many_draws(family, generator):
    # the mean errs by sd / sqrt(n), the sd by less than sd sqrt(kurtosis / n) / 2 (kurtosis below 9 here): 6 of those
    posterior = family(linear_model(), generator)
    n = 40_000
    draws, mean, std = posterior.sample(n, generator), posterior.mean(), posterior.std()
    for name, values in draws.items():
        assert ((values.mean(0) - mean[name]).abs() < 6 * std[name] / math.sqrt(n)).all()
        assert ((values.std(0) - std[name]).abs() < 6 * std[name] * 1.5 / math.sqrt(n)).all()


def test_draws_repeat_with_their_generator_and_move_without(family, generator):
    posterior = family(linear_model(), generator)
    first, second = (posterior.sample(20, torch.Generator().manual_seed(3)) for _ in range(2))
    assert same_params(first, second)
    assert not same_params(posterior.sample(20), first)


def test_a_prediction_is_the_same_every_time_unless_a_generator_is_given(family, generator):
    model = linear_model()
    x, _ = linear_data(generator=generator)
    posterior = family(model, generator)
    first = posterior.predict(x, 4)
    torch.rand(3)
    assert torch.equal(posterior.predict(x, 4).samples, first.samples)
    fresh = [posterior.predict(x, 4, torch.Generator().manual_seed(k)).samples for k in (0, *range(10))]
    assert torch.equal(fresh[0], fresh[1])
    assert not all(torch.equal(each, first.samples) for each in fresh)  # few atoms may come up the same by chance


def test_predicting_leaves_the_global_random_state_alone(family, generator):
    x, _ = linear_data(generator=generator)
    posterior = family(linear_model(), generator)
    state = torch.get_rng_state()
    posterior.predict(x, 4)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_draws_of_a_prediction_do_not_depend_on_how_many_there_are(generator):
    x, _ = linear_data(generator=generator)
    posterior = diagonal_posterior(linear_model(), generator)
    assert torch.equal(posterior.predict(x, 20).samples[:6], posterior.predict(x, 6).samples)


def test_the_prediction_of_a_linear_net_has_the_moments_in_closed_form(generator):
    # f = w.x + b under independent normals: mean m.x + m_b, variance sum_d s_d^2 x_d^2 + s_b^2; y adds the noise.
    # With K draws the mean errs by sd / sqrt(K), the variance by v sqrt(2 / K): 5 of those
    x, _ = linear_data(6, generator=generator)
    posterior = diagonal_posterior(linear_model(noise=0.3), generator)
    draws = 2_000
    prediction = posterior.predict(x, draws)
    mean = x @ posterior.loc["weight"].T + posterior.loc["bias"]
    variance = x.square() @ posterior.scale["weight"].square().T + posterior.scale["bias"].square()
    assert ((prediction.mean - mean).abs() < 5 * (variance / draws).sqrt()).all()
    assert ((prediction.epistemic - variance).abs() < 5 * variance * math.sqrt(2 / draws)).all()
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(variance, 0.09))


def test_the_likelihoods_own_parameters_are_drawn_with_the_others(generator):
    x, _ = linear_data(6, generator=generator)
    posterior = diagonal_posterior(linear_model(noise=None), generator)
    draws = posterior.draw_block(0, 16, 16, posterior.seed)
    noise = draws["likelihood.log_noise"].exp().square().mean()
    torch.testing.assert_close(posterior.predict(x, 16).aleatoric, noise.expand(6, 1))


def test_predictions_use_the_buffers_of_the_fit(generator):
    x = torch.randn((5, 2), generator=generator)
    model = kn.Model(batch_norm_net(), kn.Gaussian(0.1))
    moved = {name: value + 1 for name, value in model.buffers().items()}
    plain, other = (diagonal_posterior(model, torch.Generator().manual_seed(1), buffers=b) for b in (None, moved))
    assert not torch.allclose(plain.predict(x, 3).samples, other.predict(x, 3).samples)
    assert same_params(other.buffers, moved)


def test_the_buffers_of_a_posterior_are_its_own():
    model = kn.Model(batch_norm_net(), kn.Gaussian(0.1))
    buffers = model.buffers()
    posterior = diagonal_posterior(model, buffers=buffers)
    buffers["1.running_mean"] += 1
    assert posterior.buffers["1.running_mean"].sum() == 0


def test_predictions_carry_no_gradient(family):
    prediction = family(linear_model()).predict(torch.zeros((2, 2), requires_grad=True), 3)
    assert not prediction.samples.requires_grad


def test_predictions_take_arrays(family, generator):
    x, _ = linear_data(generator=generator)
    posterior = family(linear_model(), generator)
    assert torch.equal(posterior.predict(x.numpy(), 4).mean, posterior.predict(x, 4).mean)


def test_a_posterior_without_a_density_says_which_have_one():
    posterior = atoms(linear_model(), 3)
    with pytest.raises(
        kn.Unsupported, match=r"Particles has no density. Families with one: .*DiagonalNormal.*FullNormal"
    ):
        posterior.log_prob(posterior.mean())
    with pytest.raises(kn.Unsupported, match="Particles has no density, so it cannot be a prior"):
        posterior.as_prior()


@pytest.mark.parametrize(
    ("call", "error", "wanted"),
    [
        (lambda p: p.sample(0), kn.InvalidArgument, "n must be a whole number >= 1, got 0"),
        (lambda p: p.sample(2.0), kn.InvalidType, "n must be a whole number, got float 2.0"),
        (lambda p: p.sample(2, generator=3), kn.InvalidType, "generator must be a torch.Generator.*got int"),
        (lambda p: p.predict(torch.zeros(2, 2), 0), kn.InvalidArgument, "samples must be a whole number >= 1, got 0"),
        (lambda p: p.predict(torch.zeros(2, 2), generator=3), kn.InvalidType, "generator must be a torch.Generator"),
        (lambda p: p.predict(torch.zeros(9, 3)), kn.InvalidData, r"cannot take x of shape \(9, 3\)"),
        (lambda p: p.predict(torch.zeros(0, 2)), kn.InvalidData, "x is empty"),
        (lambda p: p.predict(5.0), kn.InvalidData, "x must have rows"),
        (lambda p: p.predict("x.csv"), kn.InvalidType, "x must be a tensor, an array or a data frame"),
        (lambda p: list(p.predict_stream(torch.zeros(2, 2), 0)), kn.InvalidArgument, "samples must be a whole number"),
    ],
)
def test_wrong_calls_are_refused(call, error, wanted, family):
    with pytest.raises(error, match=wanted):
        call(family(linear_model()))


def test_a_posterior_can_be_copied_and_pickled(family, generator):
    x, _ = linear_data(4, generator=generator)
    posterior = family(linear_model(), generator, log_evidence=kn.LogEvidence(-3.0, "bound", 0.1))
    for other in (copy.deepcopy(posterior), pickle.loads(pickle.dumps(posterior))):
        assert torch.equal(other.predict(x, 4).samples, posterior.predict(x, 4).samples)
        assert (other.log_evidence, other.log_evidence.kind) == (-3.0, "bound")


def test_a_posterior_prints_its_size_and_evidence():
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), random="weight")
    posterior = diagonal_posterior(model, log_evidence=kn.LogEvidence(-3.25, "bound"))
    assert repr(posterior) == "DiagonalNormal(2 random parameters of Linear, log evidence -3.25 (bound))"
    assert repr(atoms(model, 3)) == "Particles(3 atoms, 2 random parameters of Linear)"


def test_a_posterior_of_another_target_says_so():
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), random="weight")
    posterior = diagonal_posterior(model, diagnostics=kn.Diagnostics(notes=(f"beta=2: {NOT_BAYES} (beta=1 is).",)))
    shown = "DiagonalNormal(2 random parameters of Linear, not the Bayes posterior: see diagnostics.notes)"
    assert repr(posterior) == shown


class _WithStatistics(kn.Particles):
    """Atoms that each have running means of their own, and a number that is no tensor."""

    family = "particles with statistics"

    def __init__(self, model, stack, log_weights=None, *, shift=0.0, **common):
        super().__init__(model, stack, log_weights, **common)
        self.shift = shift

    def buffer_block(self, start, stop, samples, seed):
        steps = torch.arange(start, stop, dtype=self.model.dtype).view(-1, 1)
        return {"1.running_mean": steps + torch.zeros(4, dtype=self.model.dtype)}

    def run_draws(self, stack, x, *, first, seed, vectorise):
        return super().run_draws(stack, x, first=first, seed=seed, vectorise=vectorise) + self.shift

    def _settings(self):
        return {"shift": self.shift}

    @classmethod
    def _from_tensors(cls, model, tensors, *, shift, **common):
        stack = {k.removeprefix("stack."): v for k, v in tensors.items() if k.startswith("stack.")}
        return cls(model, stack, tensors["log_weights"], shift=shift, **common)


del kn.Posterior.families[_WithStatistics.family]  # it is for the tests below alone


@pytest.mark.parametrize("memory", [None, 4000])
def test_draws_may_have_buffers_of_their_own_and_be_run_in_another_way(memory, generator):
    net = batch_norm_net().to(DTYPE)
    model = kn.Model(net, kn.Gaussian(0.1))
    plain = atoms(model, 5, generator)
    posterior = _WithStatistics(model, plain.stack, plain.log_weights, shift=2.0)
    x = torch.randn((6, 2), generator=generator, dtype=DTYPE)
    samples = posterior.predict(x, max_memory=memory).samples
    for k in range(5):
        buffers = {**posterior.buffers, "1.running_mean": torch.full((4,), float(k), dtype=DTYPE)}
        draw = {name: value[k] for name, value in plain.stack.items()}
        assert torch.allclose(samples[k], model.forward(draw, x, buffers=buffers) + 2.0)


def test_settings_come_back_from_disk(generator, tmp_path, monkeypatch):
    plain = atoms(kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian(0.1)), 5, generator)
    posterior = _WithStatistics(plain.model, plain.stack, plain.log_weights, shift=0.1)
    monkeypatch.setitem(kn.Posterior.families, _WithStatistics.family, _WithStatistics)
    loaded = kn.load(posterior.save(tmp_path / "it"))
    assert loaded.shift == 0.1


def test_signal_to_noise_is_the_mean_over_the_spread_of_random_parameters(family, generator):
    posterior = family(linear_model(noise=None, random="weight"), generator)
    found = posterior.signal_to_noise()
    assert list(found) == ["weight"]
    torch.testing.assert_close(found["weight"], posterior.mean()["weight"].abs() / posterior.std()["weight"])


def test_signal_without_spread_is_infinitely_clear():
    model = linear_model()
    loc = {"weight": torch.tensor([[2.0, 0.0]], dtype=DTYPE), "bias": torch.zeros(1, dtype=DTYPE)}
    scale = {"weight": torch.tensor([[0.0, 0.0]], dtype=DTYPE), "bias": torch.ones(1, dtype=DTYPE)}
    found = kn.DiagonalNormal(model, loc, scale).signal_to_noise()
    assert found["weight"].isposinf().all() and found["bias"].item() == 0.0
