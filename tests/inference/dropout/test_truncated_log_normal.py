from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from knowable.inference.dropout.truncated_log_normal import (
    divergence_from_log_uniform,
    draw_log_noise,
    mean_and_relative_variance,
    mills_ratio,
)

LOW, HIGH = -20.0, 0.0
# inside the interval, at its ends, and far beyond both of them
LOCATIONS = [-40.0, -25.0, -20.1, -20.0, -19.0, -12.0, -5.0, -1.0, -0.05, 0.0, 0.05, 1.0, 5.0, 20.0]
SCALES = [1e-2, 0.1, 0.5, 1.0, 4.0, 20.0, 200.0]
GRID = [(loc, scale) for loc in LOCATIONS for scale in SCALES]
# double precision inside; arguments that were rounded to float32 move the divergence by some 1e-7 of its own slopes
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}


NODES, WEIGHTS = np.polynomial.legendre.leggauss(60)


class Numerical:
    """The same by Gauss-Legendre quadrature, over pieces that are as wide as the bulk of the density."""

    def __init__(self, loc: float, scale: float):
        self.loc, self.scale, self.peak = loc, scale, min(max(loc, LOW), HIGH)
        away = abs(loc - self.peak)
        bulk = min(scale, scale**2 / away) if away else scale
        inner = {min(max(self.peak + k * bulk, LOW), HIGH) for k in (-50, -20, -8, -4, -2, -1, 0, 1, 2, 4, 8, 20, 50)}
        self.cuts = sorted({LOW, HIGH, *inner})
        self.mass = self._integral(np.ones_like)

    def log_density(self, x: np.ndarray) -> np.ndarray:
        """Up to its constant, and 0 at the peak."""
        return -(x - self.peak) * (x + self.peak - 2 * self.loc) / (2 * self.scale**2)

    def _integral(self, function: Callable[[np.ndarray], np.ndarray], up_to: float = HIGH) -> float:
        cuts = [cut for cut in self.cuts if cut < up_to] + [up_to]
        total = 0.0
        for a, b in itertools.pairwise(cuts):
            x = 0.5 * (a + b) + 0.5 * (b - a) * NODES
            total += 0.5 * (b - a) * float(WEIGHTS @ (np.exp(self.log_density(x)) * function(x)))
        return total

    def divergence(self) -> float:
        mean = self._integral(self.log_density) / self.mass
        return mean - math.log(self.mass) + math.log(HIGH - LOW)

    def moments(self) -> tuple[float, float]:
        mean = self._integral(lambda x: np.exp(x - self.peak)) / self.mass
        variance = self._integral(lambda x: (np.exp(x - self.peak) - mean) ** 2) / self.mass
        return mean * math.exp(self.peak), variance / mean**2

    def cdf(self, x: float) -> float:
        return self._integral(np.ones_like, x) / self.mass if x > LOW else 0.0


def tensors(loc: float, scale: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.tensor([loc], dtype=dtype), torch.tensor([scale], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_divergence_is_the_integral(dtype):
    for loc, scale in GRID:
        given = tensors(loc, scale, dtype)
        expected = Numerical(given[0].item(), given[1].item()).divergence()
        found = divergence_from_log_uniform(*given, LOW, HIGH)
        assert found.dtype == dtype
        assert abs(found.item() - expected) < TOLERANCE[dtype] * max(1.0, expected), (loc, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mean_and_signal_to_noise_are_the_integrals(dtype):
    for loc, scale in GRID:
        given = tensors(loc, scale, dtype)
        mean, spread = Numerical(given[0].item(), given[1].item()).moments()
        found, found_spread = mean_and_relative_variance(*given, LOW, HIGH)
        assert math.isclose(found.item(), mean, rel_tol=TOLERANCE[dtype]), (loc, scale)
        # a difference of logarithms of order 1: what is below rounding, signal-to-noise of a million, is not seen
        assert math.isclose(found_spread.item(), spread, rel_tol=TOLERANCE[dtype] * 10, abs_tol=2e-15), (loc, scale)


def test_wide_noise_is_the_prior():
    # log θ uniform on [-20, 0]: E θ = (1 - e^-20) / 20, E θ² = (1 - e^-40) / 40
    mean, spread = mean_and_relative_variance(*tensors(-3.0, 2e3), LOW, HIGH)
    assert math.isclose(mean.item(), 1 / 20, rel_tol=1e-4)
    assert math.isclose(spread.item(), 20**2 / 40 - 1, rel_tol=1e-4)
    assert abs(divergence_from_log_uniform(*tensors(-3.0, 2e3), LOW, HIGH).item()) < 1e-4


def test_narrow_noise_is_the_log_normal_without_ends():
    loc, scale = -3.0, 0.1
    mean, spread = mean_and_relative_variance(*tensors(loc, scale), LOW, HIGH)
    assert math.isclose(mean.item(), math.exp(loc + scale**2 / 2), rel_tol=1e-12)
    assert math.isclose(spread.item(), math.expm1(scale**2), rel_tol=1e-10)
    entropy = 0.5 * math.log(2 * math.pi * math.e * scale**2)
    assert math.isclose(divergence_from_log_uniform(*tensors(loc, scale), LOW, HIGH).item(), math.log(20) - entropy)


def test_both_ends_are_alike():
    loc = torch.tensor(LOCATIONS, dtype=torch.float64)
    for scale in SCALES:
        one = divergence_from_log_uniform(loc, torch.full_like(loc, scale), LOW, HIGH)
        other = divergence_from_log_uniform(LOW + HIGH - loc, torch.full_like(loc, scale), LOW, HIGH)
        assert torch.allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("function", [divergence_from_log_uniform, mean_and_relative_variance])
def test_gradients_are_those_of_finite_differences(function):
    loc, scale = (torch.tensor(each, dtype=torch.float64) for each in zip(*GRID[::2], strict=True))
    keep = (scale > 0.05) & (scale < 100)  # others need steps of a size that rounding does not allow
    inputs = loc[keep].requires_grad_(), scale[keep].requires_grad_()

    def of_both(a: Tensor, b: Tensor) -> Tensor:
        found = function(a, b, LOW, HIGH)
        return found if isinstance(found, Tensor) else torch.stack(found)

    assert torch.autograd.gradcheck(of_both, inputs, eps=1e-5, atol=1e-5, rtol=1e-4, fast_mode=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_everything_is_finite_at_the_extremes(dtype, generator):
    pairs = [(m, s) for m in (-1e3, -40.0, -10.0, 0.0, 20.0, 1e3) for s in (1e-4, 1e-2, 1.0, 200.0, 1e4)]
    loc, scale = (torch.tensor(each, dtype=dtype, requires_grad=True) for each in zip(*pairs, strict=True))
    uniform = torch.rand((50, len(pairs)), generator=generator)
    uniform[0], uniform[1] = 0.0, 1.0
    drawn = draw_log_noise(loc, scale, LOW, HIGH, uniform)
    values = [divergence_from_log_uniform(loc, scale, LOW, HIGH), *mean_and_relative_variance(loc, scale, LOW, HIGH)]
    assert all(torch.isfinite(each).all() for each in (drawn, *values))
    assert (drawn >= LOW).all() and (drawn <= HIGH).all()
    torch.stack([drawn.sum(), *(each.sum() for each in values)]).sum().backward()
    assert torch.isfinite(loc.grad).all() and torch.isfinite(scale.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("loc", "scale"),
    [
        (-5.0, 0.1), (-1.0, 1.0), (-10.0, 200.0), (0.0, 0.5), (1.0, 0.3), (9.0, 0.5), (30.0, 1.0), (-21.0, 0.5),
        (-60.0, 2.0),
    ],
)  # fmt: skip
def test_draws_have_the_cdf(loc, scale, dtype, generator):
    n = 4000
    given = (each.expand(1) for each in tensors(loc, scale, dtype))
    drawn = draw_log_noise(*given, LOW, HIGH, torch.rand((n, 1), generator=generator)).squeeze(1).double()
    exact = Numerical(loc, scale)
    points = drawn.sort().values[:: n // 200]  # the largest distance between the two CDFs, at some of the draws
    distance = max(abs((drawn <= x).double().mean().item() - exact.cdf(x.item())) for x in points)
    assert distance < 2.2 / math.sqrt(n)  # Kolmogorov: exceeded once in 8,000 times


def test_draws_invert_the_cdf():
    uniform = torch.linspace(0.001, 0.999, 41, dtype=torch.float64).unsqueeze(1)
    for loc, scale in [(-1.0, 1.0), (0.3, 0.2), (2.0, 0.5), (25.0, 0.1), (-23.0, 1.0)]:
        drawn = draw_log_noise(*tensors(loc, scale), LOW, HIGH, uniform).squeeze(1)
        exact = Numerical(loc, scale)
        found = torch.tensor([exact.cdf(x.item()) for x in drawn], dtype=torch.float64)
        expected = uniform.squeeze(1) if loc < -10 else 1 - uniform.squeeze(1)  # from the nearer end
        assert torch.allclose(found, expected, atol=1e-8), (loc, scale)


def test_gradients_of_draws_are_those_of_finite_differences(generator):
    pairs = [(-5.0, 0.3), (-1.0, 1.0), (-0.1, 2.0), (0.5, 0.4), (3.0, 1.0), (-24.0, 1.0), (-10.5, 30.0)]
    loc, scale = (torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in zip(*pairs, strict=True))
    uniform = torch.rand((6, len(pairs)), generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a, b: draw_log_noise(a, b, LOW, HIGH, uniform), (loc, scale), eps=1e-6, atol=1e-6, rtol=1e-5
    )


def test_mills_ratio_is_that_of_the_normal_distribution():
    x = torch.linspace(-3, 30, 50, dtype=torch.float64)
    expected = (scipy.stats.norm.logsf(x) - scipy.stats.norm.logpdf(x)).tolist()
    assert torch.allclose(mills_ratio(x).log(), torch.tensor(expected, dtype=torch.float64))
