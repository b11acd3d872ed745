"""Annealed importance sampling beside exact evidence: conjugate models, and quadrature for small networks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.testing import LinearGaussian

SMALL_SHARE = pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning")


def small_problem(seed: int) -> LinearGaussian:
    return LinearGaussian.make(n=20, d=2, noise=0.5, seed=seed)


def error_of(posterior: kn.Particles, exact: float) -> float:
    """Distance from the exact log evidence in standard errors."""
    return abs(posterior.log_evidence - exact) / posterior.log_evidence.standard_error


def test_evidence_is_the_exact_one_on_the_way_there_and_back(seed):
    problem = small_problem(seed)
    posterior = kn.AnnealedImportance(draws=100).fit(problem.model(), problem.data, seed=seed)
    assert error_of(posterior, problem.log_evidence) < 4
    found = posterior.diagnostics
    assert abs(found["log_evidence_back"] - problem.log_evidence) < 4.5 * found["log_evidence_back_error"]
    assert found.converged and posterior.log_evidence.kind == "estimate" and found["acceptance"] > 0.5


@pytest.mark.slow
def test_evidence_is_within_three_standard_errors_on_twenty_seeds():
    for number in range(20):
        problem = small_problem(number)
        posterior = kn.AnnealedImportance().fit(problem.model(), problem.data, seed=number)
        assert error_of(posterior, problem.log_evidence) < 3, number


def test_weighted_draws_are_the_posteriors(seed):
    problem = small_problem(seed)
    posterior = kn.AnnealedImportance(draws=200).fit(problem.model(), problem.data, seed=seed)
    effective = 1 / posterior.weights.square().sum().item()
    error = problem.covariance.diagonal().sqrt() / math.sqrt(effective)
    assert ((problem.as_flat(posterior.mean()) - problem.mean).abs() < 4.5 * error).all()
    relative = problem.as_flat(posterior.std()) / problem.covariance.diagonal().sqrt()
    assert ((relative - 1).abs() < 4.5 / math.sqrt(2 * effective)).all()


def log_evidence_by_quadrature(x: Tensor, y: Tensor, noise: float, width: float = 6.0, points: int = 161) -> float:
    """Of v tanh(w x) + c with standard normal weights, two hidden units: (v, c) in closed form, w on a grid."""
    grid = torch.linspace(-width, width, points, dtype=torch.float64)
    terms = []
    for w in itertools.product(grid.tolist(), repeat=2):
        features = torch.cat([torch.tanh(x * torch.tensor(w).double()), torch.ones_like(x)], 1)
        covariance = features @ features.T + noise**2 * torch.eye(len(x), dtype=torch.float64)
        factor = torch.linalg.cholesky(covariance)
        away = torch.linalg.solve_triangular(factor, y, upper=False)
        log_density = -0.5 * (away**2).sum() - factor.diagonal().log().sum() - 0.5 * len(x) * math.log(2 * math.pi)
        terms.append(log_density - 0.5 * (w[0] ** 2 + w[1] ** 2) - math.log(2 * math.pi))
    return (torch.stack(terms).logsumexp(0) + 2 * (grid[1] - grid[0]).log()).item()


def test_evidence_of_a_network_with_a_hidden_layer_is_that_of_quadrature(seed):
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).unsqueeze(1)
    y = torch.tanh(1.5 * x) - 0.3 + 0.2 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.2))
    posterior = kn.AnnealedImportance(draws=100).fit(model, (x, y), seed=seed)
    assert error_of(posterior, log_evidence_by_quadrature(x, y, 0.2, points=81)) < 4


@pytest.mark.parametrize(
    "method",
    [kn.AnnealedImportance(draws=50, moves="metropolis"), kn.AnnealedImportance(draws=50, mass="diagonal")],
    ids=["random walks", "a diagonal mass"],
)
def test_other_moves_estimate_the_same(seed, method):
    problem = small_problem(seed)
    assert error_of(method.fit(problem.model(), problem.data, seed=seed), problem.log_evidence) < 4.5


def test_prior_of_another_shape_is_annealed_from_too(seed):
    # one weight: quadrature
    x = torch.randn(12, 1, dtype=torch.float64)
    y = 2 * x + 0.5 * torch.randn_like(x)
    model = kn.Model(nn.Linear(1, 1, bias=False).double(), kn.Gaussian(0.5), kn.StudentTPrior())
    grid = torch.linspace(-4, 8, 4001, dtype=torch.float64)
    values = [model.log_joint({"weight": w.view(1, 1)}, x, y, 12) for w in grid]
    exact = (torch.stack(values).logsumexp(0) + (grid[1] - grid[0]).log()).item()
    assert error_of(kn.AnnealedImportance(draws=50).fit(model, (x, y), seed=seed), exact) < 4.5


@SMALL_SHARE
def test_one_step_is_importance_sampling_from_the_prior(seed):
    problem = small_problem(seed)
    method = kn.AnnealedImportance(draws=30, temperatures=1)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    assert posterior.diagnostics["temperatures"] == 1
    spread = posterior.log_weights.max() - posterior.log_weights.min()
    assert spread > 10  # log likelihoods of draws from the prior


def test_too_few_steps_are_warned_of(seed):
    problem = LinearGaussian.make(n=60, d=8, noise=0.1, seed=seed)
    with pytest.warns(kn.ConvergenceWarning, match="more temperatures than 2"):
        posterior = kn.AnnealedImportance(draws=20, temperatures=2).fit(problem.model(), problem.data, seed=seed)
    assert posterior.diagnostics.converged is False


def test_points_are_trained_and_improper_priors_refused(seed):
    x = torch.linspace(-1, 1, 16).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    model = kn.Model(net, kn.Gaussian(0.3), random="last_layer")
    posterior = kn.AnnealedImportance(draws=20).fit(model, (x, x), seed=seed)
    assert set(posterior.points) == {"0.weight", "0.bias"} and len(posterior) == 20
    with pytest.raises(kn.Unsupported, match="improper"):
        kn.AnnealedImportance().fit(kn.Model(nn.Linear(1, 1), kn.Gaussian(0.3), kn.Flat()), (x, x))
    with pytest.raises(kn.InvalidArgument, match="draws"):
        kn.AnnealedImportance(draws=1)


def log_evidence_by_nested_sampling(
    model: kn.Model, x: Tensor, y: Tensor, *, live: int, seed: int
) -> tuple[float, float]:
    """Skilling's nested sampling, slow and obvious: the log evidence and its standard error, under a N(0, 1) prior.

    The worst of the live points gives way to a draw from the prior that is better, made of another live point by 30
    steps of a random walk that leaves the prior as it is. With each one the prior mass left shrinks by e^(-1/live).
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: value.shape for name, value in model.params().items()}
    sizes = [shape.numel() for shape in shapes.values()]

    def log_likelihood(points: Tensor) -> Tensor:
        parts = zip(shapes.items(), points.split(sizes, 1), strict=True)
        stack = {name: part.view(-1, *shape) for (name, shape), part in parts}
        return torch.func.vmap(lambda one: model.log_likelihood(one, x, y).sum())(stack)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    points = normal(live, sum(sizes))
    values, step, number = log_likelihood(points), 1.0, 0
    log_evidence = torch.tensor(-math.inf, dtype=torch.float64)
    replaced = live // 20  # so many at a time, each with its own share of the mass
    while True:
        order = values.argsort()
        for place in order[:replaced]:
            number += 1
            term = values[place] - number / live + math.log(math.expm1(1 / live))
            log_evidence = torch.logaddexp(log_evidence, term)
        rest = values.logsumexp(0) - math.log(live) - number / live
        if rest < log_evidence - 7:  # a thousandth is left
            break
        limit, others = values[order[replaced - 1]], order[replaced:]
        walkers = points[others[torch.randint(len(others), (replaced,), generator=generator)]]
        found = log_likelihood(walkers)
        for _ in range(30):
            there = math.sqrt(1 - step**2) * walkers + step * normal(*walkers.shape)
            better = log_likelihood(there)
            accepted = better > limit
            walkers, found = torch.where(accepted.unsqueeze(1), there, walkers), torch.where(accepted, better, found)
            step = min(1.0, step * math.exp((accepted.double().mean().item() - 0.3) / 10))
        points[order[:replaced]], values[order[:replaced]] = walkers, found
    log_evidence = torch.logaddexp(log_evidence, rest)
    shrunk = number / live  # logarithm of what is left of the prior: the information, and a little more
    return log_evidence.item(), math.sqrt(shrunk / live)


@pytest.mark.slow
def test_evidence_of_a_network_is_that_of_quadrature_and_of_nested_sampling(seed):
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).unsqueeze(1)
    y = torch.tanh(1.5 * x) - 0.3 + 0.2 * torch.randn_like(x)
    small = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Tanh(), nn.Linear(2, 1)).double()
    model = kn.Model(small, kn.Gaussian(0.2))
    nested, error = log_evidence_by_nested_sampling(model, x, y, live=400, seed=seed)
    exact = log_evidence_by_quadrature(x, y, 0.2)
    assert abs(nested - exact) < 4 * error
    assert error_of(kn.AnnealedImportance(draws=400).fit(model, (x, y), seed=seed), exact) < 4
    # ten weights, where there is no quadrature
    larger = kn.Model(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double(), kn.Gaussian(0.2))
    nested, error = log_evidence_by_nested_sampling(larger, x, y, live=400, seed=seed)
    found = kn.AnnealedImportance(draws=200).fit(larger, (x, y), seed=seed).log_evidence
    assert abs(found - nested) < 4 * math.hypot(error, found.standard_error)
