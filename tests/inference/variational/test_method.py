"""Tests of what variational methods share: their settings, where they begin, and what they report."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.training.loop import TrainingResult
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.method import (
    VariationalMethod,
    final_elbo,
    learned_scale_notes,
    tempering_notes,
    warmup_notes,
)
from knowable.inference.variational.structured import Group, StructuredObjective
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import flat_moments

METHODS = pytest.mark.parametrize(
    "method",
    [kn.MeanFieldVI, kn.LowRankVI, kn.FullRankVI, kn.MatrixNormalVI, kn.FlowVI, kn.NaturalVI, kn.MomentVI],
)
FEW_PASSES = "knowable.inference.variational.method._ELBO_ROWS", 100
BY_MEANS = pytest.mark.parametrize("method", [kn.MeanFieldVI, kn.NaturalVI, kn.MomentVI])


@dataclass(frozen=True, repr=False, kw_only=True)
class Plain(VariationalMethod):
    """The least that a variational method defines."""

    def objective(self, model, x, size, *, start=None):
        return MeanFieldObjective(model, x, size, **self.elbo_settings(start))


def test_a_method_defines_its_objective_and_gets_the_rest(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    posterior = Plain(epochs=100).fit(problem.model(), problem.data, seed=seed)
    assert isinstance(posterior, kn.DiagonalNormal)
    assert posterior.diagnostics.method == "Plain(epochs=100)" and posterior.seed == seed
    assert {"loss", "kl", "elbo", "expected_log_likelihood"} <= posterior.diagnostics.terms.keys()
    assert posterior.log_evidence is not None and posterior.log_evidence.kind == "bound"


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

    monkeypatch.setattr("knowable.core.training.loop.TrainingRun.epoch_of_steps", interrupted)
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
def test_a_warmup_of_more_than_half_the_epochs_is_refused(method):
    with pytest.raises(kn.InvalidArgument, match="kl_warmup must be at most half of epochs=10, got 6"):
        method(kl_warmup=6, epochs=10)


@METHODS
def test_two_ways_of_tempering_at_once_are_refused(method):
    with pytest.raises(kn.InvalidArgument, match="beta and temperature cannot both differ from 1"):
        method(beta=0.5, temperature=0.5)


@pytest.mark.parametrize(
    ("settings", "epochs"),
    [
        ({}, 200),
        ({"epochs": 90}, 30),
        ({"epochs": 5000}, 200),
        ({"epochs": 2}, 0),
        ({"training": kn.Training(accumulate=2)}, 400),
    ],
)
def test_a_warmup_that_is_not_given_is_two_thousand_steps_or_a_third(settings, epochs):
    problem = LinearGaussian.make(n=100)
    method = Plain(**settings, batch_size=10, kl_warmup=None)
    rows = as_data(problem.data, problem.model(), batch_size=10)
    assert method._with_warmup(rows).kl_warmup == epochs


def test_a_warmup_that_was_chosen_is_named_in_the_report():
    problem = LinearGaussian.make(n=20)
    posterior = kn.MeanFieldVI(epochs=30, kl_warmup=None).fit(problem.model(), problem.data)
    assert posterior.diagnostics.method == "MeanFieldVI(epochs=30, kl_warmup=10)"


@dataclass(frozen=True, repr=False, kw_only=True)
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


# --- final elbo ------------------------------------------------------------------------------------------------------


def of_kind(kind: str, model: kn.Model, problem: LinearGaussian, **knobs: float):
    if kind == "mean field":
        return MeanFieldObjective(model, problem.x, len(problem.x), initial_scale=0.1, **knobs)  # type: ignore[arg-type]
    groups = [Group(kn.families.FullRank(), tuple(model.random_names))]
    return StructuredObjective(model, len(problem.x), groups, initial_scale=0.1, **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["mean field", "structured"])
@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_bound_is_that_of_the_distribution_whatever_the_factor_on_the_divergence(seed, kind, beta):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = problem.model()
    objective = of_kind(kind, model, problem, beta=beta)
    bound, terms = final_elbo(objective, as_data(problem.data, model), seed)
    loc = problem.as_flat(model.params())
    exact = problem.elbo(loc, torch.full_like(loc, 0.1))
    assert abs(bound - exact) < 4.5 * bound.standard_error
    assert bound.kind == "bound" and bound.standard_error > 0
    assert terms["elbo"] == terms["expected_log_likelihood"] - terms["kl"] == float(bound)
    kl = kn.Normal(1.0).kl_from_normal(loc, torch.full_like(loc, 0.1)).item()
    assert terms["kl"] == pytest.approx(kl, rel=1e-9)


def test_error_counts_the_noise_of_a_sampled_divergence(seed, monkeypatch):
    # noise so large that the data say next to nothing: all that varies is the divergence. The spread of 30 estimates is
    # known to 1 / sqrt(2 * 29) = 13%: within 5 of those of the error they state
    monkeypatch.setattr("knowable.inference.variational.method._ELBO_ROWS", 100)
    problem = LinearGaussian.make(n=20, seed=seed)
    stated, spread = {}, {}
    for name, prior in {"closed": kn.Normal(1.0), "sampled": kn.ScaleMixture(0.5, 1.0, 0.1)}.items():
        model = kn.Model(problem.model().net, kn.Gaussian(1e4), prior)
        objective, data = of_kind("structured", model, problem), as_data(problem.data, model)
        bounds = [final_elbo(objective, data, 1000 * seed + number)[0] for number in range(30)]
        stated[name] = statistics.fmean(bound.standard_error for bound in bounds)
        spread[name] = statistics.stdev(map(float, bounds))
    assert stated["closed"] < 1e-3 * stated["sampled"]
    assert 1 - 5 * 0.13 < spread["sampled"] / stated["sampled"] < 1 + 5 * 0.13


def test_improper_prior_has_terms_but_no_bound(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), kn.Flat())
    bound, terms = final_elbo(of_kind("structured", model, problem), as_data(problem.data, model), seed)
    assert bound is None and math.isfinite(terms["elbo"])


def test_random_numbers_of_the_caller_are_left_alone(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = problem.model()
    objective, data = of_kind("mean field", model, problem), as_data(problem.data, model)
    state = torch.get_rng_state()
    first = final_elbo(objective, data, seed)[0]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    assert float(final_elbo(objective, data, seed)[0]) == float(first)


# --- target notes ----------------------------------------------------------------------------------------------------


def result(history: list[dict[str, float]], *, epochs: float, interrupted: bool = False) -> TrainingResult:
    return TrainingResult(history, 100, epochs, None, interrupted, "", 0.0)


def test_bayes_needs_no_note():
    assert tempering_notes(1.0, 1.0) == ()
    assert warmup_notes(10, result([], epochs=100.0)) == ()
    assert learned_scale_notes(kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1)), 100) == ()


@pytest.mark.parametrize(
    ("beta", "temperature", "wanted"),
    [(0.25, 1.0, "beta=0.25: the target is not the Bayes posterior (beta=1 is). Every row counts 4 times."),
     (1.0, 0.1, "temperature=0.1: the target is not the Bayes posterior (temperature=1 is).")],
)  # fmt: skip
def test_tempering_is_named(beta, temperature, wanted):
    assert tempering_notes(beta, temperature) == (wanted,)
    assert not kn.Diagnostics(notes=tempering_notes(beta, temperature)).bayes


def test_a_fit_that_was_stopped_in_the_warm_up_says_so():
    record = {"epoch": 3.0, "loss": 1.0}
    (note,) = warmup_notes(9, result([record], epochs=3.5, interrupted=True))
    assert "from epoch 3, at a KL weight of 40%" in note
    assert not kn.Diagnostics(notes=(note,)).bayes
    (note,) = warmup_notes(9, result([], epochs=0.5, interrupted=True))
    assert "from epoch 0" in note


def test_a_state_that_held_out_data_chose_from_the_warm_up_says_so():
    history = [{"epoch": e, "validation_log_likelihood": v} for e, v in ((2.0, -1.0), (4.0, -0.5), (20.0, -0.7))]
    (note,) = warmup_notes(9, result(history, epochs=20.0))
    assert "from epoch 4" in note
    assert warmup_notes(3, result(history, epochs=20.0)) == ()


def test_early_stopping_in_the_warm_up_is_reported_by_a_fit():
    # targets are noise of size 3 where the model has 0.3: without the KL it overfits at once, and held-out rows say so
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 10, generator=generator), 3 * torch.randn(60, 1, generator=generator)
    model = kn.Model(nn.Linear(10, 1), kn.Gaussian(0.3), kn.Normal(10.0))
    method = kn.MeanFieldVI(epochs=6000, training=kn.Training(patience=2), kl_warmup=3000)
    posterior = method.fit(model, (x[:15], y[:15]), validation=(x[15:], y[15:]))
    assert any("kl_warmup" in note for note in posterior.diagnostics.notes)
    assert not posterior.diagnostics.bayes


@pytest.mark.parametrize(
    ("per", "rows", "noted"),
    [("glob", 5, False), ("parameter", 1000, False), ("parameter", 20, True), ("weight", 1000, True)],
)
def test_many_learned_scales_are_counted(per, rows, noted):
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    model = kn.Model(net, kn.Gaussian(0.1), kn.EmpiricalBayes(kn.Normal(1.0), per=per))
    notes = learned_scale_notes(model, rows)
    assert bool(notes) is noted
    if per == "weight":
        assert notes[0].startswith("33 scales of the prior were learned from the same 1,000 rows")
        assert kn.Diagnostics(notes=notes).bayes  # the target is a posterior, of a prior that the data chose


# --- what the end of a fit costs -------------------------------------------------------------------------------------


class _Counting(nn.Linear):
    """Counts the rows that it sees."""

    rows = 0

    def forward(self, x):
        type(self).rows += len(x)
        return super().forward(x)


@pytest.mark.parametrize("method", [kn.MeanFieldVI, kn.NaturalVI, kn.MCDropout, kn.MixtureVI])
def test_the_end_of_a_short_fit_costs_less_than_the_fit(method):
    x = torch.randn(20_000, 3)
    model = kn.Model(nn.Sequential(_Counting(3, 8), nn.Tanh(), nn.Linear(8, 1)), kn.Gaussian())
    seen = []
    for epochs in (2, 4):
        _Counting.rows = 0
        method(epochs=epochs, batch_size=500).fit(model, (x, x[:, :1]))
        seen.append(_Counting.rows)
    two_epochs = seen[1] - seen[0]  # with what comes after them: a tenth of it, and three times that without a gradient
    assert seen[0] < 1.5 * two_epochs
