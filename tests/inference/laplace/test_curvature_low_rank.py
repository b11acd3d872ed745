"""Tests of the leading directions of the curvature: dense matrices are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.laplace.curvature import prior_precision
from knowable.inference.laplace.curvature_low_rank import LowRankCurvature
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.testing.networks import ONE_INPUT
from tests.inference.laplace.oracle import case_expansion, dense_ggn, expansion_of, gradients

ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("name", ONE_INPUT)
def test_with_rank_enough_it_is_the_whole_matrix(name):
    # the matrix has at most rows times outputs directions
    expansion = case_expansion(name, rows=2)
    expected = dense_ggn(expansion)
    factor = LowRankCurvature.of(expansion, rank=60).factors[0]
    torch.testing.assert_close(factor @ factor.T, expected, rtol=1e-6, atol=1e-8 * expected.abs().max().item())


def test_with_less_it_has_the_leading_eigenvalues_and_directions():
    x, y = torch.randn(200, 6, dtype=torch.float64), torch.randn(200, 1, dtype=torch.float64)
    x = x * torch.tensor([100.0, 30.0, 10.0, 1.0, 0.3, 0.1], dtype=torch.float64)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    expansion = expansion_of(kn.Model(net, kn.Gaussian(0.1)), (x, y))
    whole = dense_ggn(expansion)
    values, vectors = torch.linalg.eigh(whole)
    factor = LowRankCurvature.of(expansion, rank=3).factors[0]
    torch.testing.assert_close(factor.square().sum(0), values.flip(0)[:3], rtol=1e-3, atol=0.0)
    overlap = (factor / factor.norm(dim=0)).T @ vectors.flip(1)[:, :3]
    assert (torch.linalg.svdvals(overlap) > 0.999).all()


def test_the_empirical_fisher_is_followed_too():
    expansion = case_expansion("mlp", kind="empirical_fisher")
    each = gradients(expansion)
    factor = LowRankCurvature.of(expansion, rank=20).factors[0]
    torch.testing.assert_close(factor @ factor.T, each.T @ each)


def test_determinant_solution_and_posterior_are_those_of_the_dense_precision():
    expansion = case_expansion("mlp")
    curvature, prior = LowRankCurvature.of(expansion, rank=3), prior_precision(expansion)
    precision = 2 * curvature.factors[0] @ curvature.factors[0].T + torch.eye(41, dtype=torch.float64)
    torch.testing.assert_close(curvature.log_det(prior, 2 * ONE), torch.logdet(precision))
    vector = torch.randn(41, dtype=torch.float64)
    torch.testing.assert_close(curvature.solve(prior, 2 * ONE, vector), torch.linalg.solve(precision, vector))
    posterior = LaplacePosterior(expansion.model, curvature.normal(expansion, prior, 2 * ONE))
    torch.testing.assert_close(posterior.as_prior().joint_normal(expansion.layout)[1], precision)


def test_the_posterior_before_brings_its_directions():
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.5))
    first = expansion_of(model, (x[:5], y[:5]))
    one = LowRankCurvature.of(first, rank=20)
    posterior = LaplacePosterior(first.model, one.normal(first, prior_precision(first), ONE))
    second = expansion_of(kn.Model(net, kn.Gaussian(0.5), prior=posterior), (x[5:], y[5:]))
    two, prior = LowRankCurvature.of(second, rank=20), prior_precision(second)
    both = expansion_of(model, (x, y))
    expected = dense_ggn(both) + torch.eye(both.layout.size, dtype=torch.float64)
    torch.testing.assert_close(two.log_det(prior, ONE), torch.logdet(expected))
    found = LaplacePosterior(second.model, two.normal(second, prior, ONE))
    torch.testing.assert_close(found.as_prior().joint_normal(second.layout)[1], expected)
