"""Tests of posteriors that are flows: draws, densities, moments, and the way to disk and back."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.core.network.params import Layout
from knowable.core.posterior.saving import load_posterior
from knowable.inference.variational.flow.layers import KINDS
from knowable.inference.variational.flow.posterior import FlowPosterior
from tests.core.cases import DTYPE, linear_model, mlp, same_params
from tests.inference.variational.flow.test_normalising_flow import flow_of


def posterior_of(kind: str, model: kn.Model | None = None, *, spread: float = 0.5, **common) -> FlowPosterior:
    model = model or linear_model()
    start = model.params()
    layout = Layout.of({name: start[name] for name in reversed(model.random_names)})  # not the model's own order
    flow = flow_of(kind, layout.size, spread=spread).to(model.dtype)
    return FlowPosterior(model, layout, flow, points={name: start[name] for name in model.point_names}, **common)


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_of_draws_is_that_of_the_flow(seed, kind):
    posterior = posterior_of(kind)
    values, expected = posterior._draws(7, torch.Generator().manual_seed(seed))
    draws = posterior.sample(7, torch.Generator().manual_seed(seed))
    torch.testing.assert_close(posterior.layout.flatten(draws), values)
    torch.testing.assert_close(posterior.log_prob(draws), expected, rtol=1e-6, atol=1e-8)
    one = {name: value[0] for name, value in draws.items()}
    torch.testing.assert_close(posterior.log_prob(one), expected[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_in_single_precision_the_density_is_nearly_that_in_double(seed, kind):
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
    posterior = posterior_of(kind, model)
    values, expected = posterior._draws(20, torch.Generator().manual_seed(seed))
    found = posterior.log_prob(posterior.layout.views(values))
    assert found.dtype == torch.float32
    # draws are rounded to 24 bits, which the steepest of three layers enlarges
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_moments_of_a_flow_that_only_stretches_and_shifts_are_known(seed):
    # a coupling layer whose small network is constant: the second number is exp(s) z + t
    posterior = posterior_of("real_nvp", spread=0.0)
    flow = posterior.flow
    with torch.no_grad():
        flow.layers[0].outward_bias[:] = torch.tensor([[[0.4]], [[1.5]]], dtype=DTYPE)  # s, t of the odd number
    loc, scale = flow.loc, flow.log_scale.exp()
    raw = 2 * math.tanh(0.2)
    mean, std = (posterior.layout.flatten(each) for each in (posterior.mean(), posterior.std()))
    move, stretch = torch.tensor([0.0, 1.5, 0.0], dtype=DTYPE), torch.tensor([0.0, raw, 0.0], dtype=DTYPE).exp()
    torch.testing.assert_close(mean, loc + scale * move)  # what is odd cancels in pairs of draws
    # the standard deviation of 8192 pairs errs by 1 / sqrt(2 · 8192) of itself; 5 of those
    assert ((std / (scale * stretch) - 1).abs() < 5 / math.sqrt(2 * 8192)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_moments_are_those_of_draws(seed, kind, generator):
    posterior, n = posterior_of(kind), 40_000
    draws = posterior.sample(n, generator)
    mean, std = posterior.mean(), posterior.std()
    for name, value in draws.items():
        # both sides are draws: 16,384 (as many or better, being in pairs) and n. The error of a standard deviation
        # depends on the fourth moment, here that of the draws
        share = math.sqrt(1 / 16_384 + 1 / n)
        assert ((value.mean(0) - mean[name]).abs() < 5 * share * std[name]).all()
        kurtosis = ((value - value.mean(0)) / value.std(0)).pow(4).mean(0)
        # pairs of opposite noise have nearly equal squares: half as many draws for the fixed ones
        share = math.sqrt(2 / 16_384 + 1 / n)
        assert ((value.std(0) / std[name] - 1).abs() < 5 * share * 0.5 * kurtosis.sqrt()).all()


def test_moments_are_computed_once_and_are_the_callers_own(seed):
    posterior = posterior_of("planar")
    first = posterior.mean()
    first["bias"].fill_(7.0)
    assert not torch.equal(posterior.mean()["bias"], first["bias"])
    assert same_params(posterior.mean(), posterior.mean())


@pytest.mark.parametrize("random", ["*", "last_layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_saving_and_loading_changes_nothing(kind, random, tmp_path):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random=random)
    posterior = posterior_of(kind, model, seed=5, log_evidence=kn.LogEvidence(-3.0, "bound", 0.1))
    before = torch.get_rng_state()
    loaded = load_posterior(posterior.save(tmp_path / "saved"))
    assert torch.equal(before, torch.get_rng_state())  # loading draws nothing
    assert type(loaded) is FlowPosterior and loaded.layout == posterior.layout
    draws = [each.sample(5, torch.Generator().manual_seed(0)) for each in (loaded, posterior)]
    assert same_params(*draws)
    assert torch.equal(loaded.log_prob(draws[0]), posterior.log_prob(draws[0]))
    assert same_params(loaded.mean(), posterior.mean()) and same_params(loaded.std(), posterior.std())
    x = torch.randn(4, 2, dtype=DTYPE)
    assert torch.equal(loaded.predict(x, 9).samples, posterior.predict(x, 9).samples)
    assert repr(loaded) == repr(posterior)


def test_the_flow_is_a_copy(seed):
    model = linear_model()
    layout = Layout.of(model.params())
    flow = flow_of("radial", layout.size)
    posterior = FlowPosterior(model, layout, flow)
    before = posterior.mean()
    with torch.no_grad():
        flow.loc.add_(1.0)
    assert same_params(posterior.mean(), before)
    assert not any(value.requires_grad for value in posterior.sample(2).values())


def test_a_flow_is_no_prior_and_wants_all_its_parameters():
    posterior = posterior_of("planar")
    with pytest.raises(kn.Unsupported, match="cannot be the prior"):
        posterior.as_prior()
    with pytest.raises(kn.InvalidArgument, match="params lacks bias"):
        posterior.log_prob({"weight": torch.zeros(1, 2, dtype=DTYPE)})
