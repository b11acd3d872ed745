"""Tests of draws, predictions and log likelihoods for ArviZ, of posteriors of every family."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

import knowable as kn
from tests.core.cases import DTYPE, diagonal_posterior, linear_data, linear_model, mlp

pytest.importorskip("arviz_base")


def particles(model: kn.Model, count: int = 6, log_weights=None) -> kn.Particles:
    stack = {name: torch.randn(count, *value.shape, dtype=DTYPE) for name, value in model.params().items()}
    return kn.Particles(model, stack, log_weights)


def chains(model: kn.Model, count: int = 4, draws: int = 10) -> kn.ChainPosterior:
    stack = particles(model, count * draws).stack
    return kn.ChainPosterior(model, stack, count, info={"energy": torch.randn(count, draws)})


def mixture(model: kn.Model) -> kn.Mixture:
    return kn.Mixture(model, [diagonal_posterior(model), diagonal_posterior(model)], torch.tensor([0.3, 0.7]).log())


def params_of(tree, posterior: kn.Posterior, chain: int, draw: int) -> dict:
    random = {name: value for name, value in tree["posterior"].data_vars.items() if name != "f"}
    drawn = {name: torch.as_tensor(value.values[chain, draw]) for name, value in random.items()}
    return {**posterior.points, **drawn}


@pytest.mark.parametrize("make", [diagonal_posterior, particles, chains, mixture], ids=lambda each: each.__name__)
def test_log_likelihoods_and_outputs_are_the_models_at_the_draws(make):
    model = kn.Model(mlp().to(DTYPE), kn.Gaussian())
    x, y = linear_data(7)
    posterior = make(model)
    tree = posterior.to_arviz(x, y, samples=None if make in (particles, chains) else 9)
    found = tree["log_likelihood"]["y"]
    assert found.dims == ("chain", "draw", "row")
    assert found.shape == {particles: (1, 6, 7), chains: (4, 10, 7)}.get(make, (1, 9, 7))
    for chain in range(found.shape[0]):
        for draw in range(found.shape[1]):
            params = params_of(tree, posterior, chain, draw)
            expected = model.log_likelihood(params, x, y).detach()
            np.testing.assert_allclose(found.values[chain, draw], expected, rtol=1e-9)
            outputs = model.forward(params, x).detach()
            np.testing.assert_allclose(tree["posterior"]["f"].values[chain, draw], outputs, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(tree["observed_data"]["y"].values, y)


def test_a_linearised_posterior_is_scored_as_it_predicts():
    # one draw's log likelihood, averaged over many, is the prediction's log density
    x, y = linear_data(15)
    model = linear_model()
    posterior = kn.Laplace(start=kn.MAP(epochs=200).fit(model, (x, y)), structure="full", tune="never").fit(
        model, (x, y)
    )
    scores = posterior.to_arviz(x, y, samples=1000)["log_likelihood"]["y"].values[0]
    density = np.exp(scores)
    error = density.std(0) / np.sqrt(1000)
    assert (np.abs(density.mean(0) - np.exp(posterior.predict(x).log_prob(y).numpy())) < 5 * error).all()


def test_chains_keep_their_chains_and_statistics_also_when_thinned():
    posterior = chains(linear_model())
    tree, thinned = posterior.to_arviz(), posterior.to_arviz(samples=23)
    assert set(tree.children) == {"posterior", "sample_stats"}
    np.testing.assert_array_equal(tree["posterior"]["weight"].values, posterior.draws["weight"])
    np.testing.assert_array_equal(tree["sample_stats"]["energy"].values, posterior.info["energy"])
    np.testing.assert_array_equal(thinned["posterior"]["weight"].values, posterior.draws["weight"][:, ::2])
    np.testing.assert_array_equal(thinned["sample_stats"]["energy"].values, posterior.info["energy"][:, ::2])


def test_atoms_of_unequal_weight_are_resampled_by_it(seed):
    posterior = particles(linear_model(), 3, torch.tensor([0.1, 0.2, 0.7]).log())
    posterior.stack["bias"] = torch.arange(3, dtype=DTYPE).unsqueeze(1)
    found = posterior.to_arviz(samples=4000, generator=torch.Generator().manual_seed(seed))["posterior"]["bias"].values
    shares = np.bincount(found.astype(int).flatten(), minlength=3) / 4000
    expected = np.array([0.1, 0.2, 0.7])
    assert (np.abs(shares - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000)).all()


def test_members_of_a_mixture_have_draws_by_their_weight():
    model = linear_model()
    members = [particles(model, 1000), particles(model, 1000)]
    for number, member in enumerate(members):
        member.stack["bias"] = torch.full((1000, 1), float(number), dtype=DTYPE)
    posterior = kn.Mixture(model, members, torch.tensor([0.25, 0.75]).log())
    assert posterior.to_arviz(samples=1000)["posterior"]["bias"].values.mean() == pytest.approx(0.75)


def test_outcomes_have_the_predictions_moments(seed):
    model = linear_model(noise=0.5)
    posterior, x = diagonal_posterior(model), linear_data(4)[0]
    n = 2000
    tree = posterior.to_arviz(x, samples=n, generator=torch.Generator().manual_seed(seed))
    assert set(tree.children) == {"posterior", "posterior_predictive"}
    drawn = torch.as_tensor(tree["posterior_predictive"]["y"].values[0])
    f = torch.as_tensor(tree["posterior"]["f"].values[0])
    residual = (drawn - f) / 0.5
    assert (residual.mean(0).abs() < 5 / n**0.5).all()
    assert ((residual.var(0) - 1).abs() < 5 * (2 / n) ** 0.5).all()


@pytest.mark.parametrize(("likelihood", "outputs"), [(kn.Categorical(), 3), (kn.Bernoulli(), 1), (kn.Poisson(), 1)])
def test_labels_and_counts_have_outcomes_and_log_likelihoods(likelihood, outputs):
    model = kn.Model(mlp(outputs=outputs).to(DTYPE), likelihood)
    x, y = torch.randn(5, 2, dtype=DTYPE), torch.tensor([0, 1, 1, 0, 1])
    posterior = diagonal_posterior(model)
    posterior.target_shape = ()
    tree = posterior.to_arviz(x, y, samples=20)
    assert tree["posterior_predictive"]["y"].shape == (1, 20, 5)
    assert tree["log_likelihood"]["y"].shape == (1, 20, 5)
    np.testing.assert_array_equal(tree["observed_data"]["y"].values, y)
    values = tree["posterior_predictive"]["y"].values
    assert (values == np.round(values)).all() and values.min() >= 0


def test_the_same_call_gives_the_same_draws_and_a_generator_new_ones():
    posterior, (x, y) = diagonal_posterior(linear_model()), linear_data(4)
    first, second = (posterior.to_arviz(x, y, samples=10) for _ in range(2))
    other = posterior.to_arviz(x, y, samples=10, generator=torch.Generator().manual_seed(1))
    for group in ("posterior", "posterior_predictive", "log_likelihood"):
        assert first[group].equals(second[group])
        assert not first[group].equals(other[group])


def test_leave_one_out_agrees_with_the_exact_one(seed):
    # conjugate regression: the exact density of each row given all others. The estimate from 500 draws is repeated
    # with new draws, whose spread is its standard error
    loo = pytest.importorskip("arviz_stats.loo").loo
    problem = kn.testing.LinearGaussian.make(n=30, d=2)
    x, y = problem.x, problem.y
    posterior = kn.ExactLinear().fit(problem.model(), (x, y))
    exact = sum(left_out(problem, k) for k in range(30))
    generator = torch.Generator().manual_seed(seed)
    estimates = [loo(posterior.to_arviz(x, y, samples=500, generator=generator)) for _ in range(10)]
    found = np.array([each.elpd for each in estimates])
    assert abs(found.mean() - exact) < 6 * found.std(ddof=1) / np.sqrt(10)
    assert abs(found[0] - exact) < estimates[0].se


def left_out(problem: kn.testing.LinearGaussian, k: int) -> float:
    """Log density of row k under the exact posterior of all others."""
    others = torch.arange(30) != k
    design = torch.cat([problem.x, torch.ones(30, 1, dtype=DTYPE)], dim=1)
    a, b = design[others], design[k]
    precision = a.T @ a / problem.noise**2 + torch.eye(3, dtype=DTYPE) / problem.prior_scale**2
    mean = torch.linalg.solve(precision, a.T @ problem.y[others, 0]) / problem.noise**2
    variance = b @ torch.linalg.solve(precision, b) + problem.noise**2
    return torch.distributions.Normal(b @ mean, variance.sqrt()).log_prob(problem.y[k, 0]).item()


# --- memory and wrong calls ------------------------------------------------------------------------------------------


def test_under_a_memory_limit_the_result_is_the_same_and_too_small_a_limit_is_refused():
    posterior, (x, y) = diagonal_posterior(linear_model()), linear_data(50)
    free, capped = (posterior.to_arviz(x, y, samples=20, max_memory=limit) for limit in (None, "100kB"))
    np.testing.assert_allclose(free["log_likelihood"]["y"], capped["log_likelihood"]["y"], rtol=1e-12)
    with pytest.raises(kn.InvalidArgument, match="max_memory=20,000 is too small: 20 draws take"):
        posterior.to_arviz(x, y, samples=20, max_memory="20kB")
    with pytest.raises(kn.InvalidArgument, match="max_memory=1,000 is too small: 1,000 draws take"):
        posterior.to_arviz(max_memory="1kB")


def test_wrong_data_are_refused_by_name():
    posterior, (x, y) = diagonal_posterior(linear_model()), linear_data(4)
    with pytest.raises(kn.InvalidArgument, match="y needs the inputs x"):
        posterior.to_arviz(y=y)
    with pytest.raises(kn.InvalidData, match="same number of rows"):
        posterior.to_arviz(x, y[:3])
    with pytest.raises(kn.InvalidData, match=r"y has shape \(4, 2\)"):
        posterior.to_arviz(x, x)
    with pytest.raises(kn.InvalidType, match="x must be a tensor"):
        posterior.to_arviz(["a", "b"], y[:2])
    with pytest.raises(kn.InvalidType, match="samples must be a whole number"):
        posterior.to_arviz(x, y, samples="many")  # type: ignore[arg-type]
    counts = diagonal_posterior(kn.Model(mlp().to(DTYPE), kn.Poisson()))
    with pytest.raises(kn.InvalidData, match="y must be a whole number, 0 or more, got -1 in row 2"):
        counts.to_arviz(x, [0, 1, -1, 2])


def test_without_arviz_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz_base", None)
    with pytest.raises(kn.MissingExtra, match=r"to_arviz needs ArviZ: pip install 'knowable\[diag\]'"):
        diagonal_posterior(linear_model()).to_arviz()
