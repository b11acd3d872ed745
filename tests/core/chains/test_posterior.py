"""Tests of posteriors made of chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.chains.posterior import ChainPosterior
from knowable.core.network.params import Layout
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.saving import load_posterior
from tests.core.cases import DTYPE, linear_model, mlp, same_params

CHAINS, DRAWS = 4, 25


def chain_posterior(model: kn.Model | None = None, *, dtype: torch.dtype = DTYPE, **settings) -> ChainPosterior:
    """Chains of random numbers, as views of one buffer, as a sampler leaves them."""
    model = model or linear_model()
    start = model.params()
    layout = Layout.of({name: start[name] for name in model.random_names})
    buffer = torch.randn(CHAINS, DRAWS, layout.size, dtype=DTYPE).to(dtype)
    points = {name: start[name] for name in model.point_names}
    return ChainPosterior(model, layout.views(buffer.reshape(-1, layout.size)), CHAINS, points=points, **settings)


def test_draws_are_the_stack_by_chain():
    posterior = chain_posterior()
    assert posterior.draws["weight"].shape == (CHAINS, DRAWS, 1, 2)
    assert torch.equal(posterior.draws["weight"][1, 0], posterior.stack["weight"][DRAWS])


def test_moments_are_those_of_all_draws():
    posterior = chain_posterior()
    draws = posterior.draws["weight"].numpy()
    np.testing.assert_allclose(posterior.mean()["weight"], draws.mean((0, 1)), rtol=1e-12)
    np.testing.assert_allclose(posterior.std()["weight"], draws.std((0, 1)), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_draws_moments_and_predictions_have_the_models_dtype_whatever_is_stored(dtype):
    posterior = chain_posterior(dtype=dtype)
    x = torch.randn(3, 2, dtype=DTYPE)
    assert posterior.stack["weight"].dtype == dtype
    for params in (posterior.mean(), posterior.std(), posterior.sample(2)):
        assert all(value.dtype == DTYPE for value in params.values())
    assert posterior.predict(x).samples.dtype == posterior.function_draws(x).dtype == DTYPE


def test_chains_that_are_not_equally_long_are_refused():
    with pytest.raises(kn.InvalidArgument, match="100 draws, which 3 chains cannot share"):
        ChainPosterior(linear_model(), {"weight": torch.zeros(100, 1, 2), "bias": torch.zeros(100, 1)}, 3)


def test_its_text_says_how_many_chains_and_draws_there_are():
    assert repr(chain_posterior()) == "ChainPosterior(4 chains x 25 draws, 3 random parameters of Linear)"


# --- functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_function_draws_are_the_networks_outputs_draw_by_draw(block, monkeypatch):
    monkeypatch.setattr("knowable.core.chains.posterior._BLOCK", block)
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random="last_layer")
    posterior = chain_posterior(model)
    x = torch.randn(5, 2, dtype=DTYPE)
    found = posterior.function_draws(x)
    assert found.shape == (CHAINS, DRAWS, 5, 1)
    for chain, draw in ((0, 0), (1, 3), (3, 24)):
        params = {name: value[chain, draw] for name, value in posterior.draws.items()}
        expected = model.forward({**posterior.points, **params}, x)
        torch.testing.assert_close(found[chain, draw], expected, rtol=1e-10, atol=1e-12)


def test_function_diagnostics_see_through_an_exchange_of_hidden_units():
    # one function in all chains, but half of the chains have the two hidden units the other way round
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).to(DTYPE)
    model = kn.Model(net, kn.Gaussian(0.1))
    stack = {name: 0.01 * torch.randn(400, *value.shape, dtype=DTYPE) for name, value in model.params().items()}
    stack["0.weight"] += torch.tensor([[1.0], [-3.0]], dtype=DTYPE)
    stack["2.weight"] += torch.tensor([[2.0, 5.0]], dtype=DTYPE)
    swapped = {**stack, "0.weight": stack["0.weight"].flip(1), "0.bias": stack["0.bias"].flip(1)}
    swapped["2.weight"] = stack["2.weight"].flip(2)
    both = {name: torch.cat([stack[name][:200], swapped[name][200:]]) for name in stack}
    posterior = ChainPosterior(model, both, 4)
    assert posterior.weight_diagnostics().rhat["0.weight"].min() > 1.5
    assert posterior.function_diagnostics(torch.ones(3, 1, dtype=DTYPE)).rhat["f"].max() < 1.1


def test_diagnostics_of_functions_and_weights_know_the_run():
    posterior = chain_posterior(diagnostics=Diagnostics(message="mixed", terms={"acceptance": 0.9}))
    for found in (posterior.weight_diagnostics(), posterior.function_diagnostics(torch.zeros(2, 2))):
        assert found.message == "mixed" and found["acceptance"] == 0.9


# --- on disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_loaded_posterior_is_the_saved_one_to_the_bit(dtype, tmp_path):
    saved = chain_posterior(
        dtype=dtype, seed=3, info={"energy": torch.randn(CHAINS, DRAWS)}, best={"weight": torch.randn(1, 2)}
    )
    saved.save(tmp_path / "p")
    loaded = load_posterior(tmp_path / "p")
    assert isinstance(loaded, ChainPosterior)
    assert loaded.chains == CHAINS
    assert same_params(loaded.stack, saved.stack)
    assert loaded.stack["weight"].dtype == dtype
    assert same_params(loaded.info, saved.info)
    assert saved.best is not None and loaded.best is not None and same_params(loaded.best, saved.best)
    assert same_params(loaded.mean(), saved.mean())
    assert same_params(loaded.std(), saved.std())
    x = torch.randn(4, 2, dtype=DTYPE)
    for samples in (5, 1000):
        assert torch.equal(loaded.predict(x, samples=samples).samples, saved.predict(x, samples=samples).samples)
    assert loaded.best is not None and repr(loaded) == repr(saved)


def test_no_search_no_best_weights_after_loading_either(tmp_path):
    chain_posterior().save(tmp_path / "p")
    assert load_posterior(tmp_path / "p").best is None  # type: ignore[attr-defined]


# --- prediction and ArviZ --------------------------------------------------------------------------------------------


def test_few_draws_of_a_prediction_come_from_all_chains_alike():
    # 8 of 100 draws: two from each of the four chains, which are told apart by their numbers
    model = linear_model()
    number = torch.arange(CHAINS, dtype=DTYPE).repeat_interleave(DRAWS)
    stack = {"weight": torch.zeros(100, 1, 2, dtype=DTYPE), "bias": number.unsqueeze(1)}
    found = ChainPosterior(model, stack, CHAINS).predict(torch.zeros(1, 2), samples=8).samples
    assert found.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_arviz_gets_weights_and_functions():
    pytest.importorskip("arviz_base")
    posterior = chain_posterior(info={"energy": torch.randn(CHAINS, DRAWS)})
    x = torch.randn(3, 2, dtype=DTYPE)
    weights, functions = posterior.to_arviz(), posterior.to_arviz(x)
    np.testing.assert_array_equal(weights["posterior"]["weight"].values, posterior.draws["weight"].numpy())
    np.testing.assert_array_equal(functions["posterior"]["weight"].values, posterior.draws["weight"].numpy())
    np.testing.assert_allclose(functions["posterior"]["f"].values, posterior.function_draws(x).numpy(), rtol=1e-10)
    assert weights["sample_stats"]["energy"].shape == (CHAINS, DRAWS)
