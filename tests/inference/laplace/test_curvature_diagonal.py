"""Tests of the curvature's diagonal: dense products of Jacobians by torch.func are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.laplace.curvature import prior_precision
from knowable.inference.laplace.curvature_diagonal import DiagonalCurvature
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.testing.networks import ONE_INPUT
from tests.inference.laplace.oracle import case_expansion, dense_ggn, expansion_of, gradients

ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("name", ONE_INPUT)
def test_the_diagonal_is_that_of_the_slow_matrix(name):
    expansion = case_expansion(name)
    expected = dense_ggn(expansion).diagonal()
    found = DiagonalCurvature.of(expansion).diagonals[0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9 * expected.max().item())


class Segments(nn.Module):
    """Three classes at every pixel."""

    def __init__(self, head: bool):
        super().__init__()
        self.features, self.out, self.head = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 3, 1), head

    def forward(self, x):
        logits = self.out(torch.tanh(self.features(x)))
        return logits if self.head else logits * 1.0


@pytest.mark.parametrize("head", [True, False])  # with the last layer recognised as the output, or not
def test_pixels_are_independent_of_each_other(head):
    net = Segments(head).double()
    x, y = torch.randn(3, 1, 4, 4, dtype=torch.float64), torch.randint(0, 3, (3, 4, 4))
    expansion = expansion_of(kn.Model(net, kn.Categorical()), (x, y))
    torch.testing.assert_close(DiagonalCurvature.of(expansion).diagonals[0], dense_ggn(expansion).diagonal())


def test_random_combinations_of_outputs_give_the_diagonal_on_average(seed):
    # with random signs the estimate of row n's square is unbiased; its spread over K combinations falls as 1 / sqrt(K).
    # 200 independent estimates show the mean to a 14th of their own standard deviation: 5 of those.
    net = Segments(head=True).double()
    x, y = torch.randn(2, 1, 3, 3, dtype=torch.float64), torch.randint(0, 3, (2, 3, 3))
    model = kn.Model(net, kn.Categorical(), random="features.*")
    expected = dense_ggn(expansion_of(model, (x, y))).diagonal()
    from dataclasses import replace

    probing = expansion_of(model, (x, y), most=4)
    assert probing.has_random_columns
    found = torch.stack([DiagonalCurvature.of(replace(probing, seed=1000 * seed + i)).diagonals[0] for i in range(200)])
    error = found.std(0) / len(found) ** 0.5
    assert ((found.mean(0) - expected).abs() < 5 * error + 1e-12).all()
    assert found.std(0).max() > 0


def test_the_empirical_fisher_is_the_sum_of_squared_gradients():
    expansion = case_expansion("transformer", kind="empirical_fisher")
    torch.testing.assert_close(DiagonalCurvature.of(expansion).diagonals[0], gradients(expansion).square().sum(0))


def test_the_posterior_is_the_prior_and_the_diagonal():
    expansion = case_expansion("mlp")
    curvature, prior = DiagonalCurvature.of(expansion), prior_precision(expansion)
    precision = dense_ggn(expansion).diagonal() + 1.0
    torch.testing.assert_close(curvature.log_det(prior, ONE), precision.log().sum())
    torch.testing.assert_close(curvature.solve(prior, ONE, torch.ones_like(precision)), 1 / precision)
    posterior = LaplacePosterior(expansion.model, curvature.normal(expansion, prior, ONE))
    torch.testing.assert_close(expansion.layout.flatten(posterior.scale), precision.rsqrt())
