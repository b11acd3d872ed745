"""Tests of normal outputs and roots of covariances."""

from __future__ import annotations

import torch

from knowable.core.prediction.components import NormalOutputs, root_of


def _covariance(rows: int, size: int) -> torch.Tensor:
    factor = torch.randn(rows, size, size, dtype=torch.float64)
    return factor @ factor.mT


def test_a_root_times_itself_is_the_covariance():
    for covariance in (_covariance(3, 4), _covariance(3, 1)):
        root = root_of(covariance)
        torch.testing.assert_close(root @ root.mT, covariance)


def test_a_singular_covariance_has_a_root():
    factor = torch.randn(3, 4, 2, dtype=torch.float64)
    covariance = factor @ factor.mT
    covariance[0] = 0.0
    root = root_of(covariance)
    torch.testing.assert_close(root @ root.mT, covariance)


def test_draws_have_the_moments_of_their_row(generator):
    # means err by sd / sqrt(n), covariances by sqrt((c_ij² + c_ii c_jj) / n): 5 of those
    covariance, mean, n = _covariance(3, 4), torch.randn(3, 2, 2, dtype=torch.float64), 20_000
    noise = torch.randn(n, 4, dtype=torch.float64, generator=generator)
    outputs = NormalOutputs.of_moments(mean, covariance, noise)
    assert outputs.draws.shape == (n, 3, 2, 2)
    variances = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(outputs.variance, variances.view(3, 2, 2))
    for row in range(3):
        draws = outputs.draws[:, row].flatten(1)
        assert ((draws.mean(0) - mean[row].flatten()).abs() < 5 * (variances[row] / n).sqrt()).all()
        error = ((covariance[row] ** 2 + variances[row].outer(variances[row])) / n).sqrt()
        assert ((draws.T.cov() - covariance[row]).abs() < 5 * error).all()


def test_a_rows_draws_do_not_depend_on_the_rows_beside_it():
    covariance, mean, noise = _covariance(3, 2), torch.randn(3, 2, dtype=torch.float64), torch.randn(5, 2).double()
    whole = NormalOutputs.of_moments(mean, covariance, noise).draws
    part = NormalOutputs.of_moments(mean[1:2], covariance[1:2], noise).draws
    torch.testing.assert_close(whole[:, 1:2], part)


def test_weights_are_equal_and_sum_to_one():
    outputs = NormalOutputs(torch.zeros(2, 1), torch.ones(2, 1), None, torch.zeros(4, 2, 1))
    torch.testing.assert_close(outputs.log_weights.exp(), torch.full((4,), 0.25))
