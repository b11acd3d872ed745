"""Tests of natural-gradient inference: it ends where mean-field inference ends, which is known."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.natural import adaptive_change, natural_step
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"draws": 3},
        {"estimator": "auto"},
        {"estimator": "flipout"},
        {"momentum": 0.0},
        {"training": kn.Training(optimiser="sgd")},
    ],
    ids=str,
)
def test_optimum_is_reached_with_every_setting(seed, knobs):
    problem = make(seed)
    posterior = kn.NaturalVI(**QUICK, **knobs).fit(problem.model(), problem.data, seed=seed)
    assert 0 <= shortfall(problem, posterior) < SLACK


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- natural objective -----------------------------------------------------------------------------------------------


STEP = {"step": 1, "scale": 1.0, "rate": 0.01, "decay": 0.0, "radius": 0.1}


def online_newton(
    loc: Tensor, scale: Tensor, draw: Tensor, gradient: Tensor, *, size: int, rate: float, share: float
) -> tuple[Tensor, Tensor]:
    """A step of the paper's algorithm, in its own terms: curvature h, weight decay δ = 1 / N, no momentum."""
    decay = 1.0 / size
    h = 1.0 / (size * scale**2) - decay
    estimate = gradient * (draw - loc) / scale**2
    h = h + share * (estimate - h) + 0.5 * (share * (h - estimate)) ** 2 / (h + decay)
    return loc - rate * (gradient + decay * loc) / (h + decay), 1.0 / (size * (h + decay)).sqrt()


def drawn_like(objective: MeanFieldObjective, seed: int) -> Tensor:
    """The weights that the next forward pass will draw, if the generator has that seed."""
    torch.manual_seed(seed)
    noise = torch.randn((1, objective.layout.size), dtype=objective.q.dtype)
    return (objective.q[0] + objective.q[1].exp() * noise[0]).detach()


def likelihood_gradient(objective: MeanFieldObjective, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of minus the mean log likelihood at the drawn weights, by plain autograd."""
    flat = flat.clone().requires_grad_()
    loss = -objective.model.log_likelihood(objective.layout.views(flat), x, y).mean()
    return torch.autograd.grad(loss, flat)[0]


@pytest.mark.parametrize("rows", [24, 6], ids=["all rows", "a batch"])
def test_step_is_that_of_variational_online_newton(seed, rows):
    problem = LinearGaussian.make(n=24, seed=seed)
    method = kn.NaturalVI(initial_scale=0.3, momentum=0.0, curvature_rate=0.05, radius=1e3)
    objective = method.objective(problem.model(), problem.x, 24)
    optimiser = torch.optim.Adam(objective.parameters(), lr=20.0)  # the paper's rate: 20 / 1e3
    x, y = problem.x[:rows], problem.y[:rows]
    for number in range(3):
        draw = drawn_like(objective, seed + number)
        gradient = likelihood_gradient(objective, draw, x, y)
        loc, scale = objective.q[0].detach(), objective.q[1].detach().exp()
        expected = online_newton(loc, scale, draw, gradient, size=24, rate=0.02, share=0.05)
        torch.manual_seed(seed + number)
        objective(x, y)[0].backward()
        objective.update(optimiser)
        torch.testing.assert_close(objective.q[0].detach(), expected[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(objective.q[1].detach().exp(), expected[1], rtol=1e-9, atol=1e-12)


def test_prior_precision_is_that_of_each_parameter(seed):
    # without data to speak of (noise 1e6), the scales go to those of the priors and the means to their means
    problem = LinearGaussian.make(n=20, seed=seed)
    prior = {"weight": kn.Normal(0.5, loc=0.3), "bias": kn.Normal(2.0)}
    model = kn.Model(problem.model().net, kn.Gaussian(1e6), prior)
    posterior = kn.NaturalVI(epochs=800, learning_rate=0.05, initial_scale=0.5).fit(model, problem.data, seed=seed)
    torch.testing.assert_close(
        posterior.scale["weight"], torch.full((1, 3), 0.5, dtype=torch.float64), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(posterior.scale["bias"], torch.full((1,), 2.0, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(posterior.loc["weight"], torch.full((1, 3), 0.3, dtype=torch.float64), rtol=0, atol=1e-2)


@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e6])
def test_precision_stays_positive_and_at_most_halves(generator, noise):
    q = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    before = q[1].clone()
    change = noise * torch.randn(1000, generator=generator, dtype=torch.float64)
    natural_step(q, change, torch.zeros_like(change), torch.zeros_like(change), **STEP)
    assert torch.isfinite(q).all()
    assert (q[1] <= before + 0.5 * math.log(2.0) + 1e-12).all()  # the scale grows by √2 at the most


def test_no_mean_moves_further_than_the_learning_rate(generator):
    q, gradient = torch.zeros(2, 1000, dtype=torch.float64), 10.0 ** torch.linspace(-6, 6, 1000, dtype=torch.float64)
    natural_step(q, torch.zeros_like(gradient), gradient, torch.zeros_like(gradient), **STEP)
    # short ones are rate / radius of a Newton step, here s² g = g
    torch.testing.assert_close(q[0], -(gradient * 0.1).clamp_max(0.01))


def test_momentum_is_the_debiased_mean_of_the_gradients(generator):
    gradients = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    q, momentum = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for step, each in enumerate(gradients, start=1):
        before = q[0].clone()
        settings = {**STEP, "step": step, "decay": 0.8, "rate": 100.0, "radius": 1e4}
        natural_step(q, torch.zeros_like(each), each, momentum, **settings)
        weights = 0.8 ** torch.arange(step - 1, -1, -1, dtype=torch.float64)
        mean = (weights @ gradients[:step]) / weights.sum()
        torch.testing.assert_close(q[0] - before, -0.01 * mean)


def test_log_scales_move_as_adam_would_move_them(generator):
    # without momentum; log P moves by twice as much, and v is so small that log(1 + v + v²/2) is v to the third order
    gradients = torch.randn(6, 50, generator=generator, dtype=torch.float64) * torch.logspace(
        -6, 3, 50, dtype=torch.float64
    )
    squares, theta = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([theta], lr=1e-3, betas=(0.0, 0.99), eps=0.0)
    log_scale = torch.zeros(50, dtype=torch.float64)
    for step, each in enumerate(gradients, start=1):
        log_scale -= 0.5 * adaptive_change(each.clone(), squares, step=step, rate=1e-3)
        theta.grad = each.clone()
        adam.step()
        torch.testing.assert_close(log_scale, theta.detach())


def test_estimates_that_are_zero_change_nothing():
    squares = torch.zeros(4)
    assert torch.equal(adaptive_change(torch.zeros(4), squares, step=1, rate=0.01), torch.zeros(4))


def test_points_move_by_the_optimiser_and_nothing_else_does(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), random="weight")
    objective = kn.NaturalVI().objective(model, problem.x, 20)
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.01)
    assert objective.layout == Layout.of({"weight": problem.model().net.weight})
    bias = objective.points[0].detach().clone()
    objective(*problem.data)[0].backward()
    slope = objective.points[0].grad.clone()
    objective.update(optimiser)
    torch.testing.assert_close(objective.points[0].detach(), bias - 0.01 * slope.sign(), rtol=0, atol=1e-6)
    assert set(optimiser.state[objective.q]) == {"step", "momentum", "squares"}  # Adam has not seen them
    assert objective.q.grad is None


def test_all_that_a_step_remembers_is_in_the_optimisers_state(seed):
    # a second objective that takes over parameters and state goes on with the same bits
    problem = LinearGaussian.make(n=20, seed=seed)
    first, second = (kn.NaturalVI().objective(problem.model(), problem.x, 20) for _ in range(2))
    optimisers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (first, second)]

    def steps(objective: MeanFieldObjective, optimiser: torch.optim.Optimizer, seeds: range) -> None:
        for number in seeds:
            torch.manual_seed(number)
            objective(*problem.data)[0].backward()
            objective.update(optimiser)

    steps(first, optimisers[0], range(5))
    with torch.no_grad():
        second.q.copy_(first.q)
    optimisers[1].state[second.q] = {k: v.clone() for k, v in optimisers[0].state[first.q].items()}
    steps(first, optimisers[0], range(5, 10))
    steps(second, optimisers[1], range(5, 10))
    assert torch.equal(first.q, second.q)
