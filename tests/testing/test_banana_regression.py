from __future__ import annotations

import math

import pytest
import torch

from knowable.testing import BananaRegression

PROBLEMS = [BananaRegression(), BananaRegression(y=0.3, rows=1, noise=0.4, curvature=-0.5, centre=0.7, prior_scale=1.4)]


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_evidence_is_the_integral_of_the_joint_density(problem):
    # on a grid: the trapezium rule is exact for smooth functions that vanish at the ends
    u, v = (torch.linspace(-8, 8, 1201, dtype=torch.float64) for _ in range(2))
    log_joint = problem.log_joint(torch.cartesian_prod(u, v))
    total = log_joint.logsumexp(0).item() + 2 * math.log((u[1] - u[0]).item())
    assert total == pytest.approx(problem.log_evidence, abs=1e-6)


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_model_is_the_same_problem(problem, generator):
    model, data = problem.model(), problem.data
    for theta in torch.randn(5, 2, generator=generator, dtype=torch.float64):
        found = model.log_joint({"theta": theta}, *data, size=problem.rows).item()
        assert found == pytest.approx(problem.log_joint(theta).item(), rel=1e-10)


def test_bound_of_a_normal_is_its_expectation(generator):
    # 200,000 draws: within 4.5 standard errors
    problem = BananaRegression()
    loc = torch.tensor([-0.3, 0.2], dtype=torch.float64)
    covariance = torch.tensor([[0.4, -0.2], [-0.2, 0.3]], dtype=torch.float64)
    q = torch.distributions.MultivariateNormal(loc, covariance)
    noise = torch.randn(200_000, 2, generator=generator, dtype=torch.float64)
    values = problem.log_joint(loc + noise @ q.scale_tril.T)
    error = values.std().item() / math.sqrt(len(values))
    assert abs(values.mean().item() + q.entropy().item() - problem.elbo(loc, covariance)) < 4.5 * error
    assert problem.divergence(loc, covariance) > 0


def test_posterior_density_integrates_to_one_and_is_not_normal():
    problem = BananaRegression()
    axis = torch.linspace(-6, 6, 601, dtype=torch.float64)
    theta = torch.cartesian_prod(axis, axis)
    weight = problem.log_posterior(theta).exp() * (axis[1] - axis[0]) ** 2
    assert weight.sum().item() == pytest.approx(1.0, abs=1e-6)
    mean = weight @ theta
    away = theta - mean
    covariance = (away * weight.unsqueeze(1)).T @ away
    # the third moment of v along its own axis is far from 0
    skewness = (weight * away[:, 1] ** 3).sum() / covariance[1, 1] ** 1.5
    assert abs(skewness.item()) > 0.3
    assert abs(covariance[0, 1].item()) > 0.3 * (covariance[0, 0] * covariance[1, 1]).sqrt().item()
