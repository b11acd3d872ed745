"""Tests of covariances on their way through layers, against sums written out; gradients against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from knowable.inference.variational.moment.algebra import joined_covariance, linear_covariance


def normals(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


@pytest.mark.parametrize("rows", [7, 2], ids=["by pairs of weights", "row by row"])
def test_linear_covariance_of_independent_inputs_is_the_product_of_matrices(generator, rows):
    weight, variance, own = normals(generator, 4, 3), normals(generator, rows, 3).square(), normals(generator, rows, 4)
    covariance, diagonal = linear_covariance(weight, variance, None, own)
    torch.testing.assert_close(covariance, weight @ variance.diag_embed() @ weight.T + own.diag_embed())
    torch.testing.assert_close(diagonal, covariance.diagonal(dim1=-2, dim2=-1))
    inputs = [leaf(each) for each in (weight, variance, own)]
    assert gradcheck(lambda w, v, o: linear_covariance(w, v, None, o), inputs)


def test_linear_covariance_of_correlated_inputs_is_the_product_of_matrices(generator):
    weight, factor = normals(generator, 4, 3), normals(generator, 5, 3, 3)
    inner = factor @ factor.mT
    variance = inner.diagonal(dim1=-2, dim2=-1)
    covariance, diagonal = linear_covariance(weight, variance, inner, None)
    torch.testing.assert_close(covariance, weight @ inner @ weight.T)
    torch.testing.assert_close(diagonal, covariance.diagonal(dim1=-2, dim2=-1))
    assert gradcheck(lambda w, s: linear_covariance(w, variance, s, None), [leaf(weight), leaf(inner)])


def test_linear_covariance_asks_for_no_gradient_of_what_is_known(generator):
    weight, variance = normals(generator, 3, 3), leaf(normals(generator, 5, 3).square())
    covariance, _ = linear_covariance(weight, variance, None, None)
    covariance.sum().backward()
    torch.testing.assert_close(variance.grad, weight.sum(0).square().expand(5, 3))


@pytest.fixture
def correlated(generator) -> tuple[Tensor, Tensor, Tensor]:
    """A factor of covariances, variances after the function, and the terms of its series."""
    return normals(generator, 3, 4, 4), normals(generator, 3, 4).square(), normals(generator, 4, 3, 4)


def of_factor(factor: Tensor, variance: Tensor, series: Tensor) -> Tensor:
    """Through covariances that stay symmetric, whatever is changed."""
    inner = factor @ factor.mT
    return joined_covariance(inner, inner.diagonal(dim1=-2, dim2=-1).sqrt(), variance, series)


def test_joined_covariance_is_its_series(correlated):
    factor, variance, series = correlated
    inner = factor @ factor.mT
    std = inner.diagonal(dim1=-2, dim2=-1).sqrt()
    rho = inner / (std.unsqueeze(1) * std.unsqueeze(2))
    terms = [each.unsqueeze(1) * each.unsqueeze(2) * rho**order for order, each in enumerate(series, start=1)]
    expected = sum(terms) * (1 - torch.eye(4, dtype=torch.float64)) + variance.diag_embed()
    torch.testing.assert_close(of_factor(*correlated), expected)


def test_joined_covariance_has_the_gradient_of_finite_differences(correlated):
    assert gradcheck(of_factor, [leaf(each) for each in correlated])


def test_gradient_does_not_depend_on_the_scale_of_values(correlated):
    # in single precision, where fourth powers of small covariances would be lost
    factor, variance, series = (each.float() for each in correlated)
    found = []
    for scale in (1.0, 1e-5):
        inputs = leaf(factor * scale), variance * scale**2, leaf(series * scale)
        slopes = torch.autograd.grad(of_factor(*inputs).sum(), (inputs[0], inputs[2]))
        found.append([each / scale for each in slopes])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
