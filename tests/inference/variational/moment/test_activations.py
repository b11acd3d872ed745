"""Tests of ReLU and the greater of two: values by operations of torch alone, gradients by finite differences."""

from __future__ import annotations

import math

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.autograd import gradcheck

from knowable.inference.variational.moment.activations import (
    LEAST,
    greater_moments,
    parts_of,
    rectified_moments,
    rectified_series,
    tails,
)


def normals(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def slope_in(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


def leaves(*values: Tensor) -> list[Tensor]:
    return [value.detach().clone().requires_grad_() for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tails_keep_their_digits_on_both_sides(dtype):
    alpha = torch.tensor([-6.0, -2.0, -0.1, 0.0, 0.4, 3.0, 6.0], dtype=dtype)
    density, below, least = (each.double() for each in tails(alpha))
    exact = alpha.double().numpy()
    size = abs(exact)
    torch.testing.assert_close(density, torch.from_numpy(scipy.stats.norm.pdf(exact)), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(below, torch.from_numpy(scipy.stats.norm.cdf(exact)), rtol=1e-5, atol=0.0)
    expected = scipy.stats.norm.pdf(size) - size * scipy.stats.norm.sf(size)
    # what cancels is of the size of the density, whose exponent α²/2 is rounded, as are a few factors
    error = (0.5 * torch.from_numpy(size) ** 2 + 8) * torch.finfo(dtype).eps
    assert ((least - torch.from_numpy(expected)).abs() <= error * density).all()


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_rectified_moments_have_the_gradient_of_finite_differences(generator, slope):
    mean, variance = normals(generator, 20), normals(generator, 20).square() + 0.05
    assert gradcheck(lambda m, v: rectified_moments(m, v, slope), leaves(mean, variance))


@pytest.mark.parametrize("slope", [0.0, 0.3])
def test_rectified_series_is_that_of_quadrature_and_differentiable(generator, slope):
    mean, std = normals(generator, 5), normals(generator, 5).abs() + 0.3
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    weights = torch.softmax(-0.5 * z.square(), 0)
    values = torch.nn.functional.leaky_relu(mean.unsqueeze(1) + std.unsqueeze(1) * z, slope)
    hermite = [z, z**2 - 1, z**3 - 3 * z, z**4 - 6 * z**2 + 3]
    terms = [(values * he) @ weights / math.sqrt(math.factorial(n)) for n, he in enumerate(hermite, start=1)]
    # the corner falls between two nodes: an error of the order of their distance squared
    torch.testing.assert_close(rectified_series(mean, std, slope), torch.stack(terms), rtol=0.0, atol=1e-6)
    assert gradcheck(lambda m, s: rectified_series(m, s, slope), leaves(mean, std))


def test_greater_moments_have_the_gradient_of_finite_differences(generator):
    means, variances = normals(generator, 2, 30), normals(generator, 2, 30).square() + 0.05
    assert gradcheck(greater_moments, leaves(means[0], variances[0], means[1], variances[1]))


def test_greater_of_one_that_is_far_above_is_that_one():
    found = leaves(*(torch.tensor([value]) for value in (50.0, 0.04, -50.0, 0.09)))
    mean, variance = greater_moments(*found)
    torch.testing.assert_close((mean.item(), variance.item()), (50.0, 0.04))
    (mean + variance).sum().backward()
    torch.testing.assert_close([slope_in(each).item() for each in found], [1.0, 1.0, 0.0, 0.0])


def test_known_values_have_no_slope_in_their_variance():
    # the standard deviation is held at a little above zero there, so that nothing is divided by zero
    mean, variance = leaves(torch.zeros(3), torch.tensor([0.0, 0.5 * LEAST, 1.0]))
    rectified_moments(mean, variance)[0].sum().backward()
    assert slope_in(variance)[:2].eq(0).all() and slope_in(variance)[2] > 0
    given = leaves(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.zeros(1))
    greater_moments(*given)[0].sum().backward()
    assert all(slope_in(each).isfinite().all() for each in given)
    assert slope_in(given[1]).item() == slope_in(given[3]).item() == 0.0


@pytest.mark.parametrize("step", [2, 1], ids=["apart", "overlapping"])
def test_parts_are_slices_and_hand_their_gradients_back(generator, step):
    values = normals(generator, 2, 7)
    places = [(..., slice(first, first + 4, step)) for first in (0, 1)]
    for found, place in zip(parts_of(values, places), places, strict=True):
        assert torch.equal(found, values[place])
    assert gradcheck(lambda x: parts_of(x, places), leaves(values))
