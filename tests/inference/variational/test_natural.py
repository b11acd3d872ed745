"""Tests of natural-gradient inference: it ends where mean-field inference ends, which is known."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.testing import LinearGaussian
from tests.inference.variational.logistic import Logistic
from tests.inference.variational.oracle import flat_moments

# What noisy steps leave: the same slack, for the same reasons, as in the tests of MeanFieldVI.
SLACK = 0.15
QUICK = {"epochs": 800, "learning_rate": 0.03}


def make(seed: int, **changes: object) -> LinearGaussian:
    return LinearGaussian.make(**{"n": 30, "noise": 0.7, "seed": seed, **changes})  # type: ignore[arg-type]


def shortfall(problem: LinearGaussian, posterior: kn.DiagonalNormal) -> float:
    return problem.elbo() - problem.elbo(*flat_moments(problem, posterior))


@functools.cache
def fitted(seed: int) -> tuple[LinearGaussian, kn.DiagonalNormal]:
    problem = make(seed)
    return problem, kn.NaturalVI(epochs=2000).fit(problem.model(), problem.data, seed=seed)


def test_means_and_standard_deviations_are_those_of_the_closed_form(seed):
    # what noise is left when the rate has fallen; 0.15 of a standard deviation costs 0.15² nats a weight
    problem, posterior = fitted(seed)
    loc, std = flat_moments(problem, posterior)
    torch.testing.assert_close(std, problem.mean_field_std, rtol=0.15, atol=0)
    assert ((loc - problem.mean).abs() < 0.25 * problem.mean_field_std).all()
    assert shortfall(problem, posterior) < SLACK / 2


def test_reported_bound_is_that_of_the_fitted_normals(seed):
    problem, posterior = fitted(seed)
    exact = problem.elbo(*flat_moments(problem, posterior))
    assert abs(posterior.log_evidence - exact) < 4 * posterior.log_evidence.standard_error
    assert posterior.log_evidence.kind == "bound"
    assert type(posterior) is kn.DiagonalNormal
    assert posterior.diagnostics["elbo"] == float(posterior.log_evidence)
    assert not posterior.diagnostics.notes


@pytest.mark.parametrize(
    "knobs",
    [{}, {"draws": 3}, {"estimator": "auto"}, {"estimator": "flipout"}, {"momentum": 0.0}, {"optimiser": "sgd"}],
    ids=str,
)
def test_optimum_is_reached_with_every_setting(seed, knobs):
    problem = make(seed)
    posterior = kn.NaturalVI(**QUICK, **knobs).fit(problem.model(), problem.data, seed=seed)
    assert 0 <= shortfall(problem, posterior) < SLACK


@pytest.mark.parametrize("as_loader", [False, True], ids=["tensors", "loader"])
def test_mini_batches_reach_it_too(seed, as_loader):
    problem = make(seed, n=60)
    data = DataLoader(TensorDataset(*problem.data), batch_size=20, shuffle=True) if as_loader else problem.data
    method = kn.NaturalVI(epochs=400, learning_rate=0.03, batch_size=20)
    assert shortfall(problem, method.fit(problem.model(), data, seed=seed)) < SLACK


@pytest.mark.parametrize("precision", ["full", "bfloat16"])
def test_float32_reaches_it_too(seed, precision):
    problem = make(seed, dtype=torch.float32)
    posterior = kn.NaturalVI(**QUICK).fit(problem.model(), problem.data, seed=seed, engine=kn.Engine(precision))
    assert posterior.loc["weight"].dtype == torch.float32
    assert shortfall(problem, posterior) < (SLACK if precision == "full" else 2 * SLACK)


@pytest.mark.slow
@pytest.mark.parametrize("n", [30, 3000])
def test_default_settings_reach_it_by_themselves(seed, n):
    problem = make(seed, n=n)
    posterior = kn.NaturalVI().fit(problem.model(), problem.data, seed=seed)
    assert posterior.diagnostics.converged
    assert shortfall(problem, posterior) < 2 * SLACK


def test_start_is_forgotten(seed):
    # eight times too wide, and sixty times too narrow
    problem = make(seed)
    for scale in (1.0, 0.002):
        method = kn.NaturalVI(**QUICK, initial_scale=scale)
        assert shortfall(problem, method.fit(problem.model(), problem.data, seed=seed)) < SLACK


@pytest.mark.parametrize("beta", [0.3, 3.0])
def test_beta_leads_to_the_tempered_optimum(seed, beta):
    problem = make(seed)
    posterior = kn.NaturalVI(**QUICK, beta=beta).fit(problem.model(), problem.data, seed=seed)
    assert shortfall(problem.tempered(beta), posterior) < SLACK
    assert "beta" in posterior.diagnostics.notes[0]


def test_warm_up_ends_at_the_same_optimum(seed):
    problem = make(seed)
    posterior = kn.NaturalVI(**QUICK, kl_warmup=200).fit(problem.model(), problem.data, seed=seed)
    assert shortfall(problem, posterior) < SLACK


def test_point_estimates_and_normals_are_learned_together(seed):
    # a quadratic log joint: the point is at the exact mean, the other standard deviations do not change
    problem = make(seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), random="weight")
    posterior = kn.NaturalVI(epochs=1500).fit(model, problem.data, seed=seed)
    best = problem.mean_field_std
    assert abs(posterior.points["bias"].item() - problem.mean[-1].item()) < 0.3 * best[-1]
    torch.testing.assert_close(posterior.scale["weight"][0], best[:-1], rtol=0.2, atol=0)


def test_clipped_gradients_still_lead_there(seed):
    problem = make(seed)
    posterior = kn.NaturalVI(**QUICK, training=kn.Training(clip=100.0)).fit(problem.model(), problem.data, seed=seed)
    assert shortfall(problem, posterior) < SLACK


# --- likelihoods and priors that are not normal ----------------------------------------------------------------------


def test_logistic_regression_has_the_optimum_that_quadrature_finds(seed):
    # and MeanFieldVI finds it too: both within 0.1 nats of the best bound there is for independent normals
    problem = Logistic.make(n=60, seed=seed)
    best = problem.bound(*problem.optimum())
    for method in (kn.NaturalVI(**QUICK), kn.MeanFieldVI(**QUICK)):
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        loc, std = (torch.cat([part["weight"][0], part["bias"]]) for part in (posterior.loc, posterior.scale))
        assert 0 <= best - problem.bound(loc, std) < 0.1


def test_learned_noise_has_the_spread_that_the_curvature_says(seed):
    # d²/dl² of the log joint is 2 N, so the standard deviation of log σ is about 1 / sqrt(2 N)
    problem = make(seed, n=100)
    model = kn.Model(problem.model().net, kn.Gaussian())
    exact = kn.ExactLinear().fit(model, problem.data)
    posterior = kn.NaturalVI(epochs=1500, draws=2, start=exact).fit(model, problem.data, seed=seed)
    spread = 1 / math.sqrt(2 * 100)
    assert abs(posterior.loc["likelihood.log_noise"] - exact.points["likelihood.log_noise"]) < spread
    assert posterior.scale["likelihood.log_noise"].item() == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize(
    "prior",
    [
        kn.LaplacePrior(0.5),
        pytest.param(kn.StudentTPrior(3.0, scale=0.5), marks=pytest.mark.slow),
        pytest.param(kn.EmpiricalBayes(kn.Normal(1.0)), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_other_priors_have_the_optimum_of_mean_field_inference(seed, prior):
    problem = make(seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), prior)
    natural, usual = (
        method.fit(model, problem.data, seed=seed) for method in (kn.NaturalVI(**QUICK), kn.MeanFieldVI(**QUICK))
    )
    error = math.hypot(natural.log_evidence.standard_error, usual.log_evidence.standard_error)
    assert abs(natural.log_evidence - usual.log_evidence) < 4 * error + SLACK


def test_flat_prior_leads_to_least_squares(seed):
    problem = make(seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), kn.Flat())
    posterior = kn.NaturalVI(**QUICK).fit(model, problem.data, seed=seed)
    wide = LinearGaussian(problem.x, problem.y, problem.noise, 1e4)
    assert shortfall(wide, posterior) < SLACK
    assert posterior.log_evidence is None


def test_second_half_after_the_first(seed):
    problem = make(seed, n=40)
    model, (x, y) = problem.model(), problem.data
    exact = kn.ExactLinear().fit(model, (x[:20], y[:20]))
    first = kn.DiagonalNormal(model, exact.mean(), exact.std())
    posterior = kn.NaturalVI(**QUICK).fit(kn.Model(model.net, model.likelihood, first), (x[20:], y[20:]), seed=seed)
    half = LinearGaussian(x[20:], y[20:], problem.noise, problem.prior_scale)
    prior_precision = exact.covariance.diagonal().reciprocal().diag()
    precision = prior_precision + half.precision - torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(flat_moments(problem, posterior)[1], precision.diagonal().rsqrt(), rtol=0.15, atol=0)


@pytest.mark.slow
def test_network_is_fitted_about_as_well_as_by_adam(seed):
    # not a convex problem, so what is compared is the bound per row: within 0.15 nats
    torch.manual_seed(seed)
    x, y = kn.datasets.sine_with_gap(n=80, seed=seed)
    net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    model = kn.Model(net, kn.Gaussian(0.1))
    bounds = [
        method.fit(model, (x, y), seed=seed).log_evidence / 80
        for method in (kn.NaturalVI(epochs=1500), kn.MeanFieldVI(epochs=1500, estimator="weight"))
    ]
    assert bounds[0] > bounds[1] - 0.15


def test_noise_of_the_draws_is_fresh_at_every_step(seed):
    problem = make(seed)
    one, two = (kn.NaturalVI(epochs=3).fit(problem.model(), problem.data, seed=each) for each in (seed, seed + 1))
    assert not torch.equal(_flat(one.loc), _flat(two.loc))


def _flat(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in params.values()])


@pytest.mark.parametrize(
    "knobs",
    [{"draws": 0}, {"estimator": "score"}, {"momentum": 1.0}, {"curvature_rate": 0.0}, {"curvature_rate": 2.0},
     {"radius": 0.0}],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises(kn.InvalidArgument, match=next(iter(knobs))):
        kn.NaturalVI(**knobs)
