from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import Data
from knowable.inference.dropout.mc_dropout import DropoutObjective
from knowable.inference.dropout.placement import place_dropout
from tests.inference.dropout.networks import Residual, perceptron
from tests.inference.dropout.oracle import DropoutRegression

# How close a fit comes to the maximum of its bound, in nats: what Adam's last, small steps leave. Measured on ten
# seeds: at most 0.11. Masks of the wrong variance or scale cost more than twice this: see the test.
SLACK = 0.2
QUICK = {"epochs": 400, "learning_rate": 0.05}
RATE = 0.3
WAYS = ["activations", "weights"]


@functools.cache
def fitted(seed: int, way: str) -> tuple[DropoutRegression, kn.MaskedWeights]:
    problem = DropoutRegression.make(seed)
    torch.manual_seed(seed)
    return problem, kn.MCDropout(RATE, **QUICK, way=way).fit(problem.model(), problem.data, seed=seed)


def shortfall(problem: DropoutRegression, posterior: kn.MaskedWeights, rate: float = RATE) -> float:
    best = problem.bound(*problem.best_weights(rate), rate)
    return best - problem.bound(posterior.loc["weight"], posterior.loc["bias"], rate)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_on_a_linear_model_is_ridge_regression_with_a_penalty_from_the_data(seed, way):
    problem, posterior = fitted(seed, way)
    assert 0 <= shortfall(problem, posterior) < SLACK


def test_slack_would_not_hide_a_wrong_penalty(seed):
    problem = DropoutRegression.make(seed)
    best = problem.bound(*problem.best_weights(RATE), RATE)
    odds = RATE / (1 - RATE)
    wrong = {
        "no dropout": problem._ridge(1.0, 0.0, RATE),
        "half the variance of the masks": problem._ridge(1.0, odds / 2, RATE),
        "masks that are not scaled up": problem._ridge(1 - RATE, RATE * (1 - RATE), RATE),
    }
    for what, weights in wrong.items():
        assert best - problem.bound(*weights, RATE) > 2 * SLACK, what


@pytest.mark.parametrize("way", WAYS)
def test_the_prior_is_on_the_full_data_scale(seed, way):
    # a strong prior, which decides: the weight decay is 1 / (2 s² (1 - p)) for all rows together, in batches too
    problem = DropoutRegression.make(seed)
    problem = DropoutRegression(problem.x, problem.y, problem.noise, 0.1)
    method = kn.MCDropout(RATE, epochs=300, learning_rate=0.02, batch_size=10, way=way)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert 0 <= shortfall(problem, posterior) < SLACK
    light = problem._ridge(1.0, RATE / (1 - RATE), -1.0)  # half the penalty on weights: 1 - p of 2
    assert problem.bound(*problem.best_weights(RATE), RATE) - problem.bound(*light, RATE) > 2 * SLACK


@pytest.mark.parametrize("way", WAYS)
def test_the_reported_bound_is_that_of_the_fitted_weights(seed, way):
    problem, posterior = fitted(seed, way)
    exact = problem.bound(posterior.loc["weight"], posterior.loc["bias"], RATE)
    report = posterior.diagnostics
    assert abs(report["elbo"] - exact) < 4.5 * report["elbo_standard_error"]
    assert math.isclose(report["kl"], problem.divergence(posterior.loc["weight"], posterior.loc["bias"], RATE))
    assert report["rate.weight"] == RATE
    assert posterior.log_evidence is None  # the bound lacks a constant


def test_both_ways_end_at_the_same_bound_and_prediction(seed):
    problem, first = fitted(seed, "activations")
    _, second = fitted(seed, "weights")
    bounds = [problem.bound(each.loc["weight"], each.loc["bias"], RATE) for each in (first, second)]
    assert abs(bounds[0] - bounds[1]) < SLACK
    # a shortfall of SLACK moves no weight by more than √(2 SLACK) of its scale in the bound, at most noise / √(Σ x²)
    scale = problem.noise / problem.squares.min().sqrt()
    moved = (first.loc["weight"] - second.loc["weight"]).abs().max()
    assert moved < 2 * math.sqrt(2 * SLACK) * scale


def test_defaults_use_the_networks_own_dropout_or_put_it_before_layers(seed):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    for net, rates in ((perceptron(0.25), {"3.weight": 0.25, "6.weight": 0.25}), (perceptron(None), None)):
        posterior = kn.MCDropout(epochs=2).fit(kn.Model(net, kn.Gaussian()), (x, y))
        assert posterior.rates == (rates or {"2.weight": 0.1, "4.weight": 0.1})
        assert posterior.predict(x, samples=8).epistemic.max() > 0


def test_a_networks_own_dropout_is_the_same_as_dropout_put_there(seed):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    own, none = perceptron(0.25), perceptron(None)
    none.load_state_dict(dict(zip(none.state_dict(), own.state_dict().values(), strict=True)))
    found = [
        kn.MCDropout(rate, epochs=20).fit(kn.Model(net, kn.Gaussian()), (x, y), seed=seed)
        for net, rate in ((own, None), (none, 0.25))
    ]
    pairs = zip(found[0].loc.values(), found[1].loc.values(), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


def test_own_dropout_trains_as_ordinary_dropout_does(seed):
    # the loss of a network with nn.Dropout under MAP, whose masks are torch's own, has the same expectation
    net = perceptron(0.25)
    model = kn.Model(net, kn.Gaussian(0.5))
    x, y = torch.randn(30, 3), torch.randn(30, 1)
    method = kn.MCDropout(epochs=1)
    objective = DropoutObjective(model, 30, place_dropout(model, x, rate=method.rate, where=None))
    with torch.no_grad():
        ours = torch.stack([objective(x, y)[1]["expected_log_likelihood"] for _ in range(600)])
        params = model.params()
        theirs = torch.stack(
            [model.score(model.forward(params, x, training=True), y, params).sum() for _ in range(600)]
        )
    error = math.hypot(ours.std().item(), theirs.std().item()) / math.sqrt(600)
    assert abs(ours.mean() - theirs.mean()) < 4.5 * error


def test_a_small_rate_is_map(seed):
    problem = DropoutRegression.make(seed)
    posterior = kn.MCDropout(1e-6, **QUICK).fit(problem.model(), problem.data, seed=seed)
    mean = problem._ridge(1.0, 0.0, 0.0)
    assert problem.bound(*mean, 1e-9) - problem.bound(posterior.loc["weight"], posterior.loc["bias"], 1e-9) < SLACK


def test_noise_is_told_in_the_report(seed):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    posterior = kn.MCDropout(epochs=2).fit(kn.Model(Residual(), kn.Gaussian()), (x, y))
    assert "drop" in posterior.diagnostics.notes[0]
    assert not kn.MCDropout(epochs=2).fit(kn.Model(perceptron(), kn.Gaussian()), (x, y)).diagnostics.notes


def test_validation_is_scored_with_dropout_on(seed):
    problem = DropoutRegression.make(seed)
    posterior = kn.MCDropout(0.2, epochs=100).fit(problem.model(), problem.data, validation=problem.data, seed=seed)
    scored = posterior.diagnostics.history[-1]["validation_log_likelihood"]
    # the same quantity from the fitted posterior, with many draws; 8 draws lose a little by Jensen's inequality
    many = posterior.predict(problem.x, samples=2000).log_prob(problem.y).mean().item()
    assert abs(scored - many) < 0.3


def test_loaders_are_read(seed):
    problem = DropoutRegression.make(seed)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*problem.data), batch_size=10, shuffle=True)
    method = kn.MCDropout(RATE, epochs=100, learning_rate=0.03)
    posterior = method.fit(problem.model(), Data(loader, 40), seed=seed)
    assert shortfall(problem, posterior) < 2 * SLACK  # a quarter of the steps


def test_the_first_argument_is_the_rate():
    assert kn.MCDropout(0.3) == kn.MCDropout(rate=0.3) and repr(kn.MCDropout(0.3)) == "MCDropout(rate=0.3)"
    assert kn.MCDropout(where=["a", "b"]).where == ("a", "b")


def test_priors_that_cannot_be_are_refused(seed):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    for prior in (kn.LogUniform(), kn.EmpiricalBayes(kn.Normal(1.0))):
        with pytest.raises(kn.Unsupported):
            kn.MCDropout(epochs=1).fit(kn.Model(perceptron(), kn.Gaussian(), prior), (x, y))


def test_a_posterior_is_the_prior_of_the_next_fit(seed):
    problem = DropoutRegression.make(seed)
    before = kn.ExactLinear().fit(problem.model(), problem.data)
    model = kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(problem.noise), before)
    posterior = kn.MCDropout(0.2, epochs=5).fit(model, problem.data, seed=seed)
    assert posterior.rates == {"weight": 0.2}


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_a_rate_is_strictly_between_0_and_1(rate):
    with pytest.raises(kn.InvalidArgument, match="rate"):
        kn.MCDropout(rate)
