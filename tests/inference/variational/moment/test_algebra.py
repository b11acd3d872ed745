"""Tests of the rules of moments, each against numerical integration or sums written out."""

from __future__ import annotations

import itertools
import math

import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from knowable.inference.variational.moment import algebra as moments
from knowable.inference.variational.moment.algebra import Moments, joined_covariance, linear_covariance

SMOOTH = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus}


def normals(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def uncertain(generator: torch.Generator, *shape: int) -> Moments:
    return Moments(normals(generator, *shape), normals(generator, *shape).square())


def correlated(generator: torch.Generator, rows: int, n: int) -> Moments:
    factor = normals(generator, rows, n, n)
    covariance = factor @ factor.mT
    return Moments(normals(generator, rows, n), covariance.diagonal(dim1=-2, dim2=-1), covariance)


def integrated(function, mean: float, std: float, *, breaks: tuple[float, ...] = ()) -> tuple[float, float]:
    """Mean and variance of a function of a normal, by adaptive quadrature; ``breaks`` are its corners."""
    density = scipy.stats.norm(mean, std).pdf
    ends = sorted({mean - 12 * std, mean - 2 * std, mean, mean + 2 * std, mean + 12 * std,
                   *(b for b in breaks if abs(b - mean) < 12 * std)})  # fmt: skip

    def expectation(f) -> float:
        pieces = itertools.pairwise(ends)
        return sum(scipy.integrate.quad(lambda z: f(z) * density(z), a, b, epsabs=1e-13)[0] for a, b in pieces)

    first = expectation(function)
    return first, expectation(lambda z: (function(z) - first) ** 2)


# --- linear operations -----------------------------------------------------------------------------------------------


def slow_linear(x: Moments, weight: Moments, bias: Moments) -> tuple[Tensor, Tensor]:
    """Mean and covariance of one row's outputs, by the definition: sums over all pairs of products."""
    outputs, inputs = weight.mean.shape
    second = x.covariance[0] + torch.outer(x.mean[0], x.mean[0])  # E[x xᵀ]
    mean = weight.mean @ x.mean[0] + bias.mean
    covariance = torch.zeros(outputs, outputs, dtype=torch.float64)
    for o, p in itertools.product(range(outputs), repeat=2):
        for i, j in itertools.product(range(inputs), repeat=2):
            products = weight.mean[o, i] * weight.mean[p, j] + (weight.variance[o, i] if (o, i) == (p, j) else 0.0)
            covariance[o, p] += (
                products * second[i, j] - weight.mean[o, i] * weight.mean[p, j] * x.mean[0, i] * x.mean[0, j]
            )
        covariance[o, p] += bias.variance[o] if o == p else 0.0
    return mean, covariance


@pytest.mark.parametrize("limit", [10, 0], ids=["covariances", "variances"])
def test_linear_layer_has_the_moments_of_its_definition(generator, limit):
    x, weight, bias = correlated(generator, 1, 3), uncertain(generator, 4, 3), uncertain(generator, 4)
    found = moments.linear(x, weight, bias, limit=limit)
    mean, covariance = slow_linear(x, weight, bias)
    torch.testing.assert_close(found.mean[0], mean)
    torch.testing.assert_close(found.variance[0], covariance.diagonal())
    if limit:
        torch.testing.assert_close(found.covariance[0], covariance)
    else:
        assert found.covariance is None


def test_independent_inputs_are_those_with_a_diagonal_covariance(generator):
    x, weight = uncertain(generator, 5, 3), uncertain(generator, 4, 3)
    dense = Moments(x.mean, x.variance, x.variance.diag_embed())
    for limit in (0, 10):
        one, two = (moments.linear(each, weight, None, limit=limit) for each in (x, dense))
        torch.testing.assert_close(one.variance, two.variance)
    torch.testing.assert_close(one.covariance, two.covariance)


def test_known_inputs_or_known_weights_leave_the_other_half(generator):
    x, weight = uncertain(generator, 5, 3), uncertain(generator, 4, 3)
    only_weights = moments.linear(Moments(x.mean), weight, None, limit=10)
    torch.testing.assert_close(only_weights.variance, x.mean.square() @ weight.variance.T)
    assert only_weights.covariance is None  # outputs of independent weights at a known input are independent
    only_inputs = moments.linear(x, Moments(weight.mean), None, limit=0)
    torch.testing.assert_close(only_inputs.variance, x.variance @ weight.mean.square().T)
    bias = Moments(torch.zeros(4, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64))
    only_bias = moments.linear(Moments(x.mean), Moments(weight.mean), bias, limit=10)
    torch.testing.assert_close(only_bias.variance, bias.variance.expand(5, 4))


@pytest.mark.parametrize("settings", [{}, {"stride": 2, "padding": 1}], ids=str)
def test_convolution_is_the_linear_layer_of_its_windows(generator, settings):
    x, weight, bias = uncertain(generator, 2, 3, 6, 6), uncertain(generator, 4, 3, 3, 3), uncertain(generator, 4)
    found = moments.convolution(F.conv2d, x, weight, bias, settings)
    windows = [F.unfold(each, 3, **settings).mT for each in (x.mean, x.variance)]  # (batch, positions, 27)
    rows = Moments(*windows)
    flat = Moments(weight.mean.flatten(1), weight.variance.flatten(1))
    expected = moments.linear(rows, flat, bias, limit=0)
    for name in ("mean", "variance"):
        value = getattr(expected, name).mT.reshape(found.mean.shape)
        torch.testing.assert_close(getattr(found, name), value)


def test_bias_alone_brings_a_variance_to_every_position(generator):
    x = normals(generator, 2, 1, 5, 5)
    weight, bias = Moments(normals(generator, 3, 1, 2, 2)), uncertain(generator, 3)
    found = moments.convolution(F.conv2d, Moments(x), weight, bias, {})
    torch.testing.assert_close(found.variance, bias.variance.view(1, 3, 1, 1).expand(2, 3, 4, 4))


def test_average_divides_the_variance_by_the_count(generator):
    x = uncertain(generator, 2, 3, 4, 4)
    found = moments.average(x.mean.mean((2, 3)), x.variance.mean((2, 3)), 16)
    torch.testing.assert_close(found.variance, x.variance.sum((2, 3)) / 256)


def test_known_factor_multiplies_covariances_twice(generator):
    x, factor = correlated(generator, 2, 3), normals(generator, 3)
    found = moments.scaled(x, x.mean * factor, factor)
    torch.testing.assert_close(found.covariance, x.covariance * torch.outer(factor, factor))
    torch.testing.assert_close(found.variance, found.covariance.diagonal(dim1=-2, dim2=-1))


def test_dropout_has_the_moments_of_both_outcomes(generator):
    # E[(z x / (1 - p))²] = E[x²] / (1 - p), and the masks of two values are independent
    x = correlated(generator, 2, 3)
    found = moments.dropped(x, 0.3)
    expected = (x.variance + x.mean.square()) / 0.7 - x.mean.square()
    torch.testing.assert_close(found.variance, expected)
    off = ~torch.eye(3, dtype=torch.bool)
    torch.testing.assert_close(found.covariance[:, off], x.covariance[:, off])
    torch.testing.assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), expected)


# --- elementwise functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("mean", [-4.0, -1.0, 0.0, 0.3, 5.0])
def test_rectified_normal_has_its_integrated_moments(mean, std, slope):
    x = Moments(torch.tensor([[mean]], dtype=torch.float64), torch.tensor([[std**2]], dtype=torch.float64))
    found = moments.rectified(x, slope)
    first, second = integrated(lambda z: max(z, 0.0) + slope * min(z, 0.0), mean, std, breaks=(0.0,))
    assert found.mean.item() == pytest.approx(first, rel=1e-8, abs=1e-10)
    assert found.variance.item() == pytest.approx(second, rel=1e-6, abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rectified_normal_far_from_its_corner_is_itself_or_nothing(dtype):
    # a thousand standard deviations away: no digits may be lost to cancellation
    x = Moments(torch.tensor([[100.0, -100.0]], dtype=dtype), torch.tensor([[0.01, 0.01]], dtype=dtype))
    found = moments.rectified(x)
    torch.testing.assert_close(found.mean, torch.tensor([[100.0, 0.0]], dtype=dtype))
    torch.testing.assert_close(found.variance, torch.tensor([[0.01, 0.0]], dtype=dtype))


@pytest.mark.parametrize(("std", "tolerance"), [(0.3, 1e-5), (1.0, 1e-5), (2.0, 2e-3), (4.0, 5e-2)])
@pytest.mark.parametrize("mean", [-1.5, 0.0, 0.7])
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_function_has_its_integrated_moments(name, mean, std, tolerance):
    # nodes are half a standard deviation apart: the wider the normal, the less they see of a function of scale 1
    x = Moments(torch.tensor([[mean]], dtype=torch.float64), torch.tensor([[std**2]], dtype=torch.float64))
    found = moments.smooth(SMOOTH[name], x)
    first, second = integrated(lambda z: SMOOTH[name](torch.tensor(z, dtype=torch.float64)).item(), mean, std)
    assert found.mean.item() == pytest.approx(first, abs=tolerance)
    assert found.variance.item() == pytest.approx(second, abs=tolerance)


def pair(rho: float, means: tuple[float, float], stds: tuple[float, float]) -> Moments:
    mean, std = torch.tensor([means], dtype=torch.float64), torch.tensor([stds], dtype=torch.float64)
    unit = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    return Moments(mean, std.square(), (unit * torch.outer(std[0], std[0])).unsqueeze(0))


def integrated_covariance(function, x: Moments) -> float:
    """Cov(f(x), f(y)) on a fine grid of quantiles of two correlated normals."""
    z = torch.linspace(-9, 9, 1801, dtype=torch.float64)
    weight = torch.exp(-0.5 * z.square())
    weight = weight / weight.sum()
    std = x.variance[0].sqrt()
    rho = x.covariance[0, 0, 1] / (std[0] * std[1])
    first = function(x.mean[0, 0] + std[0] * z)
    other = x.mean[0, 1] + std[1] * (rho * z.unsqueeze(1) + (1 - rho**2).sqrt() * z)
    means = weight @ first, weight @ (function(other) @ weight)
    return (weight @ (first * (function(other) @ weight)) - means[0] * means[1]).item()


@pytest.mark.parametrize("rho", [-0.9, -0.3, 0.5, 0.95])
@pytest.mark.parametrize("means", [(0.0, 0.0), (1.0, -0.5), (-1.0, -1.0)])
def test_covariance_of_rectified_normals_lacks_only_the_end_of_its_series(means, rho):
    # the terms left out sum to at most |ρ|⁵ times the parts of both variances that the terms kept do not have
    x = pair(rho, means, (1.0, 2.0))
    found = moments.rectified(x)
    alpha = x.mean / x.std
    density, below = (torch.from_numpy(each(alpha.numpy())) for each in (scipy.stats.norm.pdf, scipy.stats.norm.cdf))
    kept = below**2 + density**2 * (1 / 2 + alpha**2 / 6 + (alpha**2 - 1) ** 2 / 24)
    rest = (found.variance - x.variance * kept).clamp_min(0.0)
    exact = integrated_covariance(torch.relu, x)
    assert abs(found.covariance[0, 0, 1].item() - exact) < abs(rho) ** 5 * rest.prod().sqrt().item() + 1e-5
    torch.testing.assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), found.variance)


@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_covariance_of_leaky_and_smooth_functions_is_the_integrated_one(slope):
    x = pair(0.6, (0.5, -0.2), (0.8, 1.1))
    leaky = moments.rectified(x, slope).covariance[0, 0, 1].item()
    # 0.6⁵ of what four terms leave, 6 % of a variance at the most: 0.5 % of it
    assert leaky == pytest.approx(integrated_covariance(lambda z: F.leaky_relu(z, slope), x), rel=1e-2)
    smooth = moments.smooth(torch.tanh, x).covariance[0, 0, 1].item()
    assert smooth == pytest.approx(integrated_covariance(torch.tanh, x), rel=1e-2)


def test_unit_correlation_is_nearly_the_variance():
    x = pair(1.0, (0.0, 0.0), (1.0, 1.0))
    found = moments.rectified(x)
    assert 0.98 < (found.covariance[0, 0, 1] / found.variance[0, 0]).item() < 1.0


def test_covariances_stay_positive_semi_definite(generator):
    x = correlated(generator, 20, 6)
    for found in (moments.rectified(x), moments.smooth(torch.tanh, x)):
        assert torch.linalg.eigvalsh(found.covariance).min() > -1e-10


# --- the greater of two ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("means", [(0.0, 0.0), (1.0, -0.5), (-3.0, 2.0)])
@pytest.mark.parametrize("stds", [(1.0, 1.0), (0.2, 2.0)])
def test_greater_of_two_normals_has_its_integrated_moments(means, stds):
    first, second = (scipy.stats.norm(m, s) for m, s in zip(means, stds, strict=True))

    def density(z: float) -> float:
        return first.pdf(z) * second.cdf(z) + second.pdf(z) * first.cdf(z)

    ends = sorted({-30.0, 30.0, *means, *(m + k * s for m, s in zip(means, stds, strict=True) for k in (-4, 4))})
    raw = [
        sum(scipy.integrate.quad(lambda z, k=k: z**k * density(z), a, b)[0] for a, b in itertools.pairwise(ends))
        for k in (1, 2)
    ]
    parts = [
        Moments(torch.tensor([m], dtype=torch.float64), torch.tensor([s**2], dtype=torch.float64))
        for m, s in zip(means, stds, strict=True)
    ]
    found = moments.maximum(*parts)
    assert found.mean.item() == pytest.approx(raw[0], abs=1e-7)
    assert found.variance.item() == pytest.approx(raw[1] - raw[0] ** 2, abs=1e-6)


def test_greatest_of_four_is_close(generator):
    # of four standard normals: mean 1.0294, variance 0.4917; two by two, results are taken to be normal
    parts = [Moments(torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))] * 4
    found = moments.greatest(parts)
    assert found.mean.item() == pytest.approx(1.0294, rel=0.01)
    assert found.variance.item() == pytest.approx(0.4917, rel=0.06)
    assert moments.greatest(parts[:1]) is parts[0]
    three = moments.greatest(parts[:3])
    assert three.mean.item() == pytest.approx(3 / (2 * math.sqrt(math.pi)), rel=0.01)


# --- helpers ---------------------------------------------------------------------------------------------------------


def test_quadrature_integrates_polynomials_and_knows_its_hermite_polynomials():
    like = torch.zeros((), dtype=torch.float64)
    nodes, weights = moments.quadrature(like)
    assert [(weights @ nodes**k).item() for k in (0, 1, 2, 4)] == pytest.approx([1, 0, 1, 3], rel=1e-4, abs=1e-12)
    polynomials = moments._polynomials(nodes)  # orthonormal, but for what lies beyond 5.5 standard deviations
    eye = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(polynomials * weights @ polynomials.mT, eye, rtol=0, atol=2e-3)


def test_gradients_are_finite_where_nothing_is_random():
    mean = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    variance = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    for found in (moments.rectified(Moments(mean, variance)), moments.smooth(torch.tanh, Moments(mean, variance))):
        (found.mean.sum() + found.variance.sum()).backward()
    assert torch.isfinite(mean.grad).all() and torch.isfinite(variance.grad).all()


# --- moment covariance -----------------------------------------------------------------------------------------------


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
def correlated_covariance(generator) -> tuple[Tensor, Tensor, Tensor]:
    """A factor of covariances, variances after the function, and the terms of its series."""
    return normals(generator, 3, 4, 4), normals(generator, 3, 4).square(), normals(generator, 4, 3, 4)


def of_factor(factor: Tensor, variance: Tensor, series: Tensor) -> Tensor:
    """Through covariances that stay symmetric, whatever is changed."""
    inner = factor @ factor.mT
    return joined_covariance(inner, inner.diagonal(dim1=-2, dim2=-1).sqrt(), variance, series)


def test_joined_covariance_is_its_series(correlated_covariance):
    factor, variance, series = correlated_covariance
    inner = factor @ factor.mT
    std = inner.diagonal(dim1=-2, dim2=-1).sqrt()
    rho = inner / (std.unsqueeze(1) * std.unsqueeze(2))
    terms = [each.unsqueeze(1) * each.unsqueeze(2) * rho**order for order, each in enumerate(series, start=1)]
    expected = sum(terms) * (1 - torch.eye(4, dtype=torch.float64)) + variance.diag_embed()
    torch.testing.assert_close(of_factor(*correlated_covariance), expected)


def test_joined_covariance_has_the_gradient_of_finite_differences(correlated_covariance):
    assert gradcheck(of_factor, [leaf(each) for each in correlated_covariance])


def test_gradient_does_not_depend_on_the_scale_of_values(correlated_covariance):
    # in single precision, where fourth powers of small covariances would be lost
    factor, variance, series = (each.float() for each in correlated_covariance)
    found = []
    for scale in (1.0, 1e-5):
        inputs = leaf(factor * scale), variance * scale**2, leaf(series * scale)
        slopes = torch.autograd.grad(of_factor(*inputs).sum(), (inputs[0], inputs[2]))
        found.append([each / scale for each in slopes])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
