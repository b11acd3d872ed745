"""Moments of activations against closed forms, and against integrals in two dimensions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor, nn

from knowable.errors import Unsupported
from knowable.inference.functional.activations import ErfMoments, HermiteSeries, OneKink, dual_of, is_elementwise

VARIANCES = torch.tensor([0.01, 0.3, 2.0, 30.0], dtype=torch.float64)
CORRELATIONS = (-1.0, -0.7, 0.0, 0.5, 0.99, 0.99999, 1.0)


def _covariances(rho: float) -> tuple[Tensor, Tensor, Tensor]:
    a, b = VARIANCES.unsqueeze(1), VARIANCES.unsqueeze(0)
    return a, b, rho * (a * b).sqrt()


def integral(function, a: float, b: float, c: float, kink: bool = False) -> float:
    """E[φ(u) φ(v)] by adaptive integration over u and v given u, cut at 0 where the activation has a kink."""
    slope, rest = c / a, math.sqrt(b - c * c / a)

    def inner(u: float) -> float:
        cuts = [-slope * u / rest] if kink and abs(slope * u / rest) < 9 else None
        found = integrate.quad(
            lambda z: function(slope * u + rest * z) * math.exp(-z * z / 2), -9, 9, points=cuts, epsabs=1e-11
        )[0]
        return found * function(u) * math.exp(-u * u / (2 * a))

    reach = 9 * math.sqrt(a)
    total = sum(integrate.quad(inner, *ends, epsabs=1e-10)[0] for ends in ((-reach, 0.0), (0.0, reach)))
    return total / (2 * math.pi * math.sqrt(a))


@pytest.mark.parametrize("rho", CORRELATIONS)
def test_relu_is_the_arc_cosine_kernel(rho):
    """Cho and Saul (2009), of orders 1 and 0."""
    a, b, c = _covariances(rho)
    theta = math.acos(rho)
    expected = (a * b).sqrt() / (2 * math.pi) * (math.sin(theta) + (math.pi - theta) * math.cos(theta))
    torch.testing.assert_close(OneKink(0.0).covariance(a, b, c), expected, atol=1e-10, rtol=1e-10)
    slopes = OneKink(0.0).derivative(a, b, c)
    torch.testing.assert_close(slopes, torch.full_like(slopes, (math.pi - theta) / (2 * math.pi)), atol=1e-7, rtol=0)


@pytest.mark.parametrize("rho", CORRELATIONS)
def test_hermite_series_of_erf_is_its_closed_form(rho):
    """Two ways that share nothing: Williams (1997) and a series whose terms are integrals."""
    a, b, c = _covariances(rho)
    series, exact = HermiteSeries(torch.erf, "erf"), ErfMoments()
    torch.testing.assert_close(series.covariance(a, b, c), exact.covariance(a, b, c), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(series.derivative(a, b, c), exact.derivative(a, b, c), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "function", "kink"),
    [
        (nn.Tanh(), math.tanh, False),
        (nn.GELU(), lambda u: 0.5 * u * math.erfc(-u / math.sqrt(2)), False),
        (nn.LeakyReLU(0.2), lambda u: u if u > 0 else 0.2 * u, True),
    ],
    ids=["tanh", "gelu", "leaky_relu"],
)
def test_other_activations_are_their_integrals(module, function, kink):
    a, b, c = 1.7, 0.6, 0.8
    at = [torch.tensor(each, dtype=torch.float64) for each in (a, b, c)]
    assert float(dual_of(module, "1").covariance(*at)) == pytest.approx(integral(function, a, b, c, kink), abs=1e-7)


@pytest.mark.parametrize("module", [nn.GELU(), nn.SiLU(), nn.Softplus(), nn.ELU(), nn.Sigmoid()], ids=repr)
def test_variance_of_an_activation_is_its_integral_over_one_variable(module):
    """Where two inputs are the same; to what is left out of the series at correlation 1, it is all there."""
    z, weights = np.polynomial.hermite_e.hermegauss(200)
    z, weights = torch.from_numpy(z), torch.from_numpy(weights / weights.sum())
    values = module(VARIANCES.sqrt().unsqueeze(1) * z).square() @ weights
    found = dual_of(module, "1").covariance(VARIANCES, VARIANCES, VARIANCES)
    torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-8)  # Gauss-Hermite quadrature of kinked ELU: 1e-4


def test_moments_can_be_derived():
    """Derivatives in variances and covariance, against differences."""
    at = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (1.7, 0.6, 0.8)]
    for dual in (OneKink(0.1), ErfMoments(), HermiteSeries(torch.tanh, "tanh")):
        assert torch.autograd.gradcheck(dual.covariance, at)
        assert torch.autograd.gradcheck(dual.derivative, at)


def test_kinks_that_no_series_follows_are_refused():
    one = torch.ones((), dtype=torch.float64)
    with pytest.raises(Unsupported, match=r"derivative of layer '1' \(Hardtanh\).*cannot be computed well enough"):
        dual_of(nn.Hardtanh(), "1").derivative(one, one, 0.5 * one)


def test_activations_are_told_from_other_modules():
    """Modules that mix numbers, draw them, or have weights are not activations."""
    assert all(is_elementwise(module) for module in (nn.Tanh(), nn.Softsign(), nn.Hardswish()))
    others = (nn.Softmax(1), nn.LayerNorm(12, elementwise_affine=False), nn.PReLU(), nn.Dropout(), nn.Linear(12, 12))
    assert not any(is_elementwise(module) for module in others)
