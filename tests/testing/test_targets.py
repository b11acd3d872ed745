from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch

import knowable as kn
from knowable.testing import LinearGaussian


@pytest.fixture
def problem(seed) -> LinearGaussian:
    return LinearGaussian.make(n=12, d=2, noise=0.6, seed=seed, prior_scale=1.3)


def log_joint(problem: LinearGaussian, theta: torch.Tensor) -> float:
    residual = problem.y[:, 0] - problem.design @ theta
    likelihood = scipy.stats.norm(0, problem.noise).logpdf(residual.numpy()).sum()
    return likelihood + scipy.stats.norm(0, problem.prior_scale).logpdf(theta.numpy()).sum()


def test_evidence_is_joint_over_posterior_everywhere(problem, generator):
    # Bayes' rule at any θ: log p(y) = log p(y, θ) - log p(θ | y); it ties evidence, mean and covariance together
    posterior = scipy.stats.multivariate_normal(problem.mean.numpy(), problem.covariance.numpy())
    for theta in torch.randn(5, 3, generator=generator, dtype=torch.float64):
        assert log_joint(problem, theta) - posterior.logpdf(theta.numpy()) == pytest.approx(
            problem.log_evidence, rel=1e-9
        )


def test_model_is_the_same_problem(problem, generator):
    model = problem.model()
    theta = torch.randn(3, generator=generator, dtype=torch.float64)
    found = model.log_joint(problem.as_params(theta), *problem.data, size=12).item()
    assert found == pytest.approx(log_joint(problem, theta), rel=1e-10)


def test_flat_vectors_and_parameters_are_two_views(problem):
    theta = torch.arange(3.0, dtype=torch.float64)
    params = problem.as_params(theta)
    own = problem.model().params()
    assert {name: value.shape for name, value in params.items()} == {name: value.shape for name, value in own.items()}
    assert torch.equal(problem.as_flat(params), theta)
    stack = problem.as_params(torch.stack([theta, theta + 1]))
    assert torch.equal(problem.as_flat(stack)[1], theta + 1)


def test_mean_field_optimum_is_where_the_bound_is_highest(problem, generator):
    best = problem.elbo()
    for _ in range(20):
        loc = problem.mean + 0.1 * torch.randn(3, generator=generator, dtype=torch.float64)
        std = problem.mean_field_std * (0.2 * torch.randn(3, generator=generator, dtype=torch.float64)).exp()
        assert problem.elbo(loc, std) < best
    assert best < problem.log_evidence


def test_divergence_is_that_of_two_normals(problem, generator):
    loc = torch.randn(3, generator=generator, dtype=torch.float64)
    std = torch.rand(3, generator=generator, dtype=torch.float64) + 0.1
    normal = torch.distributions.MultivariateNormal
    expected = torch.distributions.kl_divergence(
        normal(loc, scale_tril=std.diag()), normal(problem.mean, problem.covariance)
    )
    assert problem.divergence(loc, std) == pytest.approx(expected.item(), rel=1e-9)


def test_prediction_is_the_ratio_of_two_evidences(problem):
    # p(y* | y) = p(y*, y) / p(y), integrated over a grid of y* for its mean and variance
    x = torch.randn(1, 2, dtype=torch.float64)
    mean, std = problem.predictive(x)
    grid = torch.linspace(mean.item() - 8 * std.item(), mean.item() + 8 * std.item(), 201, dtype=torch.float64)

    def density(y: float) -> float:
        more = LinearGaussian(
            torch.cat([problem.x, x]), torch.cat([problem.y, torch.tensor([[y]])]), problem.noise, problem.prior_scale
        )
        return math.exp(more.log_evidence - problem.log_evidence)

    values = np.array([density(y) for y in grid.tolist()])
    assert scipy.integrate.simpson(values, x=grid) == pytest.approx(1.0, abs=1e-6)
    assert scipy.integrate.simpson(values * grid.numpy(), x=grid) == pytest.approx(mean.item(), abs=1e-6)
    second = scipy.integrate.simpson(values * (grid - mean).square().numpy(), x=grid)
    assert second == pytest.approx(std.item() ** 2, rel=1e-5)


def test_tempered_problem_maximises_the_tempered_bound(problem, generator):
    # E_q[log p(y | θ)] - β KL(q ‖ prior), written out, falls in every direction from the claimed optimum
    beta = 2.5

    def bound(loc: torch.Tensor, std: torch.Tensor) -> float:
        kl = kn.Normal(problem.prior_scale).kl_from_normal(loc, std).item()
        return problem.elbo(loc, std) + kl - beta * kl

    tempered = problem.tempered(beta)
    best = bound(tempered.mean, tempered.mean_field_std)
    for _ in range(20):
        loc = tempered.mean + 0.1 * torch.randn(3, generator=generator, dtype=torch.float64)
        std = tempered.mean_field_std * (0.2 * torch.randn(3, generator=generator, dtype=torch.float64)).exp()
        assert bound(loc, std) < best


def test_problems_are_drawn_from_their_own_model(seed):
    # yᵀ C⁻¹ y with C the marginal covariance of y is chi-squared: a Kolmogorov-Smirnov test over 200 problems
    scores = []
    for each in range(200):
        problem = LinearGaussian.make(n=5, d=1, seed=1000 * seed + each)
        covariance = problem.design @ problem.design.T + problem.noise**2 * torch.eye(5, dtype=torch.float64)
        y = problem.y[:, 0]
        scores.append((y @ torch.linalg.solve(covariance, y)).item())
    assert scipy.stats.kstest(scores, scipy.stats.chi2(5).cdf).pvalue > 1e-4


def test_seed_fixes_the_problem_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    first, second, third = (LinearGaussian.make(seed=seed) for seed in (3, 3, 4))
    first.model()
    assert torch.equal(first.x, second.x) and torch.equal(first.y, second.y)
    assert not torch.equal(first.x, third.x)
    assert torch.equal(state, torch.get_rng_state())


def test_dtype_is_that_of_data_and_network():
    problem = LinearGaussian.make(dtype=torch.float32)
    assert problem.x.dtype == problem.y.dtype == problem.model().dtype == torch.float32
    assert problem.mean.dtype == torch.float64


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"d": 0}, {"noise": 0.0}, {"prior_scale": -1.0}, {"correlation": 1.0}], ids=str
)
def test_problems_that_make_no_sense_are_refused(bad):
    with pytest.raises(kn.InvalidArgument, match=next(iter(bad))):
        LinearGaussian.make(**bad)
