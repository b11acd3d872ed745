"""Tests of what variational methods share: their settings, where they begin, and what they report."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.method import BoundMethod, VariationalMethod
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import flat_moments

METHODS = pytest.mark.parametrize(
    "method",
    [kn.MeanFieldVI, kn.LowRankVI, kn.FullRankVI, kn.MatrixNormalVI, kn.FlowVI, kn.NaturalVI, kn.MomentVI],
)
FEW_PASSES = "knowable.inference.variational.method._BOUND_ROWS", 100
BY_MEANS = pytest.mark.parametrize("method", [kn.MeanFieldVI, kn.NaturalVI, kn.MomentVI])


@dataclass(frozen=True, repr=False)
class Plain(BoundMethod):
    """The least that a variational method says of itself."""

    def objective(self, model, x, size, *, start=None):
        return MeanFieldObjective(model, x, size, initial_scale=self.initial_scale, start=start)


@dataclass(frozen=True, repr=False)
class NoBound(VariationalMethod):
    """One that says nothing of the evidence."""

    def objective(self, model, x, size, *, start=None):
        return MeanFieldObjective(model, x, size, initial_scale=self.initial_scale, start=start)


def test_a_method_defines_its_objective_and_gets_the_rest(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    posterior = Plain(epochs=100).fit(problem.model(), problem.data, seed=seed)
    assert isinstance(posterior, kn.DiagonalNormal)
    assert posterior.diagnostics.method == "Plain(epochs=100)" and posterior.seed == seed
    assert {"loss", "kl", "elbo", "expected_log_likelihood"} <= posterior.diagnostics.terms.keys()
    assert posterior.log_evidence is not None and posterior.log_evidence.kind == "bound"


def test_one_without_a_bound_claims_no_evidence():
    problem = LinearGaussian.make(n=20)
    posterior = NoBound(epochs=2).fit(problem.model(), problem.data)
    assert posterior.log_evidence is None
    assert {"loss", "kl"} <= posterior.diagnostics.terms.keys() and "elbo" not in posterior.diagnostics.terms


def test_base_has_no_objective_of_its_own():
    with pytest.raises(TypeError, match="abstract"):
        BoundMethod()  # type: ignore[abstract]


# --- where they begin ------------------------------------------------------------------------------------------------


@BY_MEANS
def test_fit_may_start_from_another_posterior(seed, method):
    problem = LinearGaussian.make(n=30, seed=seed)
    exact = kn.ExactLinear().fit(problem.model(), problem.data)
    fitted = method(epochs=1, learning_rate=1e-9, start=exact, initial_scale=0.3)
    loc, std = flat_moments(problem, fitted.fit(problem.model(seed=5), problem.data))
    torch.testing.assert_close(loc, problem.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(std, torch.full_like(std, 0.3), rtol=1e-6, atol=1e-6)


@METHODS
def test_fit_may_start_from_the_mode(method, monkeypatch):
    monkeypatch.setattr(*FEW_PASSES)
    problem = LinearGaussian.make(n=30)
    settings = {"epochs": 50, "learning_rate": 0.02}
    starts = []
    original = method.objective

    def spy(self, model, x, size, *, start=None):
        starts.append(start)
        return original(self, model, x, size, start=start)

    monkeypatch.setattr(method, "objective", spy)
    method(**settings, start="map").fit(problem.model(), problem.data)
    torch.testing.assert_close(starts[0], kn.MAP(**settings).fit(problem.model(), problem.data).mean())


def test_interrupted_fit_of_the_mode_is_an_interruption(monkeypatch):
    problem = LinearGaussian.make(n=30)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("knowable.core.training.run.TrainingRun.epoch_of_steps", interrupted)
    with pytest.raises(KeyboardInterrupt), pytest.warns(kn.Interrupted):
        Plain(epochs=5, start="map").fit(problem.model(), problem.data)


# --- what is not Bayes -----------------------------------------------------------------------------------------------


@METHODS
def test_anything_but_bayes_is_noted(method, monkeypatch):
    monkeypatch.setattr(*FEW_PASSES)
    problem = LinearGaussian.make(n=10)
    for name, value in (("beta", 0.5), ("temperature", 0.25)):
        cold = method(epochs=1, **{name: value}).fit(problem.model(), problem.data)
        assert not cold.diagnostics.bayes
        assert cold.diagnostics.notes[0].startswith(f"{name}={value:g}: the target is not the Bayes posterior")
        assert f"{name}={value}" in cold.diagnostics.method
    plain = method(epochs=1).fit(problem.model(), problem.data)
    assert plain.diagnostics.bayes and not plain.diagnostics.notes


@METHODS
def test_temperature_counts_the_entropy_and_nothing_else(seed, method):
    # the same draws for both; a flow's entropy is that of its draw
    problem = LinearGaussian.make(n=20, seed=seed)
    losses, entropy = [], 0.0
    for temperature in (1.0, 3.0):
        torch.manual_seed(seed)
        objective = method(initial_scale=0.3, temperature=temperature).objective(problem.model(), problem.x, 20)
        torch.manual_seed(seed)
        losses.append(objective(*problem.data))
        torch.manual_seed(seed)
        if method is kn.FlowVI:
            entropy = -sum(objective._draw(part).log_density.item() for part in objective.parts)
        else:
            entropy = objective.entropy().item()
    (plain, terms), (changed, changed_terms) = losses
    assert (changed - plain).item() == pytest.approx(-2 * entropy / 20, rel=1e-6)
    assert changed_terms["kl"].item() == pytest.approx(terms["kl"].item(), rel=1e-9)
    if method not in (kn.LowRankVI, kn.FlowVI):  # independent when they begin
        each = math.log(0.3) + 0.5 * math.log(2 * math.pi * math.e)
        assert entropy == pytest.approx(len(problem.mean) * each, rel=1e-6)


@pytest.mark.parametrize("temperature", [0.25, 3.0])
def test_full_covariance_is_that_of_the_tempered_posterior(seed, temperature):
    # p(θ | D)^(1/T) of a linear model: the same mean, T times the covariance. Along the draws the noise of the gradient
    # vanishes at T = 1 only: 0.1 of a standard deviation costs 0.005 nats
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    method = kn.FullRankVI(epochs=600, learning_rate=0.05, draws=4, temperature=temperature)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    names = ("weight", "bias")
    loc = torch.cat([posterior.mean()[name].flatten() for name in names])
    std = torch.cat([posterior.std()[name].flatten() for name in names])
    wanted = (temperature * problem.covariance.diagonal()).sqrt()
    torch.testing.assert_close(std, wanted, rtol=0.15, atol=0)
    assert ((loc - problem.mean).abs() < 0.25 * wanted).all()


def test_natural_gradients_end_at_the_tempered_optimum(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    method = kn.NaturalVI(epochs=1500, learning_rate=0.03, temperature=0.25)
    loc, std = flat_moments(problem, method.fit(problem.model(), problem.data, seed=seed))
    wanted = 0.5 * problem.mean_field_std
    torch.testing.assert_close(std, wanted, rtol=0.15, atol=0)
    assert ((loc - problem.mean).abs() < 0.3 * wanted).all()


# --- refusals --------------------------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize(
    "knobs",
    [
        {"beta": 0.0},
        {"beta": math.inf},
        {"temperature": 0.0},
        {"kl_warmup": -1},
        {"kl_warmup": 6, "epochs": 10},
        {"start": "mode"},
        {"start": 3},
        {"initial_scale": 0.0},
        {"epochs": 0},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(method, knobs):
    with pytest.raises((kn.InvalidArgument, kn.InvalidType), match=next(iter(knobs))):
        method(**knobs)


@METHODS
def test_two_ways_of_tempering_at_once_are_refused(method):
    with pytest.raises(kn.InvalidArgument, match="beta and temperature cannot both differ from 1"):
        method(beta=0.5, temperature=0.5)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [({}, 200), ({"epochs": 90}, 30), ({"epochs": 5000}, 200), ({"epochs": 2}, 0), ({"accumulate": 2}, 400)],
)
def test_a_warmup_that_is_not_given_is_two_thousand_steps_or_a_third(settings, epochs):
    problem = LinearGaussian.make(n=100)
    method = Plain(**settings, batch_size=10, kl_warmup=None)
    rows = as_data(problem.data, problem.model(), batch_size=10)
    assert method._chosen_warmup(rows) == epochs


def test_a_warmup_that_was_chosen_is_named_in_the_report():
    problem = LinearGaussian.make(n=20)
    posterior = kn.MeanFieldVI(epochs=30, kl_warmup=None).fit(problem.model(), problem.data)
    assert posterior.diagnostics.method == "MeanFieldVI(epochs=30, kl_warmup=10)"


@dataclass(frozen=True, repr=False)
class Narrow(Plain):
    """One that brings a prior with it."""

    def target(self, model):
        return model.with_priors({"weight": kn.Normal(1e-3)}, random=["weight"])


def test_the_bound_is_that_of_the_methods_own_target_and_the_start_that_of_the_users_model(seed, monkeypatch):
    monkeypatch.setattr(*FEW_PASSES)
    problem = LinearGaussian.make(n=50, seed=seed)
    posterior = Narrow(epochs=1, learning_rate=1e-6, start="map").fit(problem.model(), problem.data, seed=seed)
    mode = kn.MAP(epochs=1, learning_rate=1e-6).fit(problem.model(), problem.data, seed=seed)
    assert posterior.model.random_names == ["weight"] and "bias" in posterior.points
    torch.testing.assert_close(posterior.mean()["weight"], mode.mean()["weight"], rtol=0, atol=1e-4)
