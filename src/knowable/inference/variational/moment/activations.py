r"""ReLU and the greater of two normals, in closed form, with gradients written by hand.

Derivatives of expectations under normals are expectations themselves: of f' in the mean, of f''/2 in the variance. For
these two functions they consist of what the values have been computed from, so that a gradient costs a few
multiplications where autograd would go through every special function again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST = 1e-12
"""Variance below which a value counts as known."""


def tails(alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """At α: the density, the distribution function Φ, and the least of t(α) and t(-α).

    t(α) = φ(α) + α Φ(α) is the expected excess of α + z over zero. The two differ by α: so both are known without
    taking the difference of large numbers.
    """
    size = alpha.abs()
    density = torch.mul(size, size).mul_(-0.5).exp_().mul_(1.0 / math.sqrt(2 * math.pi))
    tail = torch.mul(size, math.sqrt(0.5)).erfc_().mul_(0.5)  # Φ(-|α|)
    least = torch.addcmul(density, size, tail, value=-1.0).clamp_min_(0.0)
    return density, torch.where(alpha > 0, 1.0 - tail, tail), least


def rectified_moments(mean: Tensor, variance: Tensor, slope: float = 0.0) -> tuple[Tensor, Tensor]:
    """Mean and variance of the (leaky) ReLU of normals, see :func:`.moments.rectified`."""
    return _Rectified.apply(mean, variance, slope)  # type: ignore[no-any-return]


def rectified_series(mean: Tensor, std: Tensor, slope: float = 0.0) -> Tensor:
    """The first terms b of the Hermite series of the (leaky) ReLU of normals, ``(4, *shape)``."""
    return _RectifiedSeries.apply(mean, std, slope)  # type: ignore[no-any-return]


def greater_moments(mean: Tensor, variance: Tensor, mean2: Tensor, variance2: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the greater of two, see :func:`.moments.maximum`."""
    return _Greater.apply(mean, variance, mean2, variance2)  # type: ignore[no-any-return]


def parts_of(values: Tensor, places: list[tuple[Any, ...]]) -> tuple[Tensor, ...]:
    """Copies of the parts of a tensor at these places, whose gradients are gathered in one tensor."""
    return _Parts.apply(values, places)  # type: ignore[no-any-return]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: list[tuple[Any, ...]]) -> tuple[Tensor, ...]:
        ctx.places, ctx.like = places, values.new_empty(()).expand(values.shape)
        return tuple(values[place].contiguous() for place in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.zeros_like(ctx.like, memory_format=torch.contiguous_format)
        for place, grad in zip(ctx.places, grads, strict=True):
            whole[place] += grad
        return whole, None


class _Rectified(torch.autograd.Function):
    """With E and V of the plain ReLU: ∂E/∂m = Φ, ∂E/∂v = φ/2s, ∂V/∂m = 2 E Φ(-α), ∂V/∂v = Φ - E φ/s."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor, slope: float) -> tuple[Tensor, Tensor]:
        std = variance.clamp_min(LEAST).sqrt_()
        alpha = mean / std
        density, below, least = tails(alpha)
        spread = torch.addcmul(below, least, alpha.abs().add_(least), value=-1.0).clamp_min_(0.0).mul_(variance)
        found = alpha.clamp_min_(0.0).add_(least).mul_(std)
        ctx.slope = slope
        ctx.save_for_backward(mean, variance, found, below, density.div_(std))
        if not slope:
            return found.view_as(found), spread
        rest = 1.0 - slope
        both = slope**2 * variance + (2 * slope * rest) * variance * below
        return torch.add(rest * found, mean, alpha=slope), both.add_(spread, alpha=rest**2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_spread: Tensor) -> tuple[Tensor | None, ...]:
        mean, variance, found, below, height = ctx.saved_tensors
        height = torch.ops.aten.threshold_backward(height, variance, LEAST)  # where the variance is held, it has none
        slope, rest = ctx.slope, 1.0 - ctx.slope
        first, second = (rest * grad_mean, rest**2 * grad_spread) if slope else (grad_mean, grad_spread)
        pull = second * found  # of ∂V, the part with E
        by_mean = torch.lerp(2.0 * pull, first, below)
        by_variance = torch.addcmul(second * below, torch.add(first, pull, alpha=-2.0), height, value=0.5)
        if slope:
            share = (2.0 * slope * rest) * grad_spread  # what the covariance of x and its ReLU, v Φ, brings
            by_mean.add_(grad_mean, alpha=slope).addcmul_(share * variance, height)
            by_variance.add_(grad_spread, alpha=slope**2).addcmul_(share, below).addcmul_(
                share * mean, height, value=-0.5
            )
        return by_mean, by_variance, None


class _RectifiedSeries(torch.autograd.Function):
    """With κ = Φ, φ, φ', φ'' ... at α: b_n = s κ_n / √n!, ∂b_n/∂m = κ_{n+1} / √n!, ∂b_n/∂s = b_n/s - α ∂b_n/∂m."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, std: Tensor, slope: float) -> Tensor:
        alpha = mean / std
        density, below, _ = tails(alpha)
        second = alpha * alpha - 1.0
        third = (second - 2.0).mul_(alpha)  # Hermite polynomials: α, α² - 1, α³ - 3α
        kappa = torch.stack([below, density, -alpha * density, second * density, third.mul_(density).neg_()])
        kappa.mul_(1.0 - slope)
        roots = _roots(kappa)
        series = (kappa[:-1] * std).div_(roots)
        series[0].add_(std, alpha=slope)
        ctx.save_for_backward(alpha, std, series, kappa[1:].div_(roots))
        return series.view_as(series)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, std, series, slopes = ctx.saved_tensors
        by_mean = (grad * slopes).sum(0)
        return by_mean, (grad * series).sum(0).div_(std).addcmul_(alpha, by_mean, value=-1.0), None


def _roots(like: Tensor) -> Tensor:
    """√n! for n = 1 to 4, ``(4, 1, ...)``."""
    values = [math.sqrt(math.factorial(n)) for n in range(1, 5)]
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(-1, *(1,) * (like.dim() - 1))


class _Greater(torch.autograd.Function):
    """With w = v_x / a², and E and V of the greater one.

    ∂E/∂m_x = Φ, ∂E/∂v = φ/2a, ∂V/∂m_x = 2a (w φ - t(-α) Φ) = -∂V/∂m_y, ∂V/∂v_x = Φ + φ (α (1 - w) - t(α)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, vx: Tensor, y: Tensor, vy: Tensor) -> tuple[Tensor, Tensor]:
        both = vx + vy
        std = both.clamp_min(LEAST).sqrt_()
        alpha = (x - y).div_(std)
        density, below, least = tails(alpha)
        excess, shortfall = alpha.clamp_min(0.0).add_(least), alpha.clamp_max(0.0).neg_().add_(least)  # t(α), t(-α)
        mean = torch.addcmul(y, std, excess)
        spread = torch.lerp(vy, vx, below).addcmul_(both, excess * shortfall, value=-1.0).clamp_min_(0.0)
        if any(ctx.needs_input_grad):
            share = vx / both.clamp_min(LEAST)
            by_x = torch.mul(share, density).addcmul_(shortfall, below, value=-1.0).mul_(std).mul_(2.0)
            by_v = torch.addcmul(alpha, alpha, share, value=-1.0).sub_(excess).mul_(density)
            height = torch.ops.aten.threshold_backward(density.div_(std), both, LEAST)  # 0 where the variance is held
            ctx.save_for_backward(below, height, by_x, by_v)
        return mean, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_mean: Tensor, grad_spread: Tensor) -> tuple[Tensor | None, ...]:
        below, height, by_x, by_v = ctx.saved_tensors
        first = torch.addcmul(grad_mean * below, grad_spread, by_x)
        alike = torch.mul(grad_spread, by_v).addcmul_(grad_mean, height, value=0.5)
        own = grad_spread * below
        return first, own + alike, grad_mean - first, (grad_spread - own).add_(alike)
