r"""The continuous ranked probability score: exact for mixtures of normals and for samples, an integral for the rest.

.. math:: \mathrm{CRPS}(F, y) = \int (F(x) - 1\{x \ge y\})^2\,dx = E|X - y| - \tfrac12 E|X - X'|

It has the unit of the outcome, lower is better, and for a point forecast it is the absolute error (Matheson and
Winkler, 1976; Gneiting and Raftery, 2007). These are functions of tensors; ``knowable.metrics.crps`` chooses
among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Estimated error at which an integral stops, as a share of the predictive standard deviation (or a larger residual).

The true error is mostly a hundred times smaller; the largest seen on wide mixtures of counts was four times this.
"""

_CHUNK = 1 << 18  # numbers held at once by each intermediate of the closed form
_REACH = 8.5  # standard deviations, beyond which the mass of a normal is negligible
_SPACING = 0.5  # of the smallest standard deviation: the terms left out fall as exp(-(2π / spacing)² / 4)
_MOST_SPLITS = 300
_MOST_TERMS = 512  # a sum over more integers than this becomes an integral


def sample_crps(samples: Tensor, y: Tensor) -> Tensor:
    r"""CRPS of the empirical distribution of equally weighted samples, by sorting.

    .. math:: \frac{2}{K^2} \sum_i (x_{(i)} - y)\,(K\,1\{y < x_{(i)}\} - i + \tfrac12)

    Args:
        samples: ``(K, ...)``.
        y: Observed outcomes, ``(...)``.

    Returns:
        The score of each outcome, shaped like ``y``.
    """
    count = samples.shape[0]
    error = samples.sort(0).values - y
    rank = torch.arange(1, count + 1, dtype=error.dtype, device=error.device).view(-1, *(1,) * y.dim())
    return 2 / count**2 * (error * (count * (error > 0) - rank + 0.5)).sum(0)


def normal_mixture_crps(loc: Tensor, scale: Tensor, log_weights: Tensor, y: Tensor) -> Tensor:
    r"""CRPS of a mixture of normals in closed form (Grimit, Gneiting, Berrocal and Johnson, 2006).

    .. math:: \sum_k w_k A(y - \mu_k, \sigma_k^2)
        - \tfrac12 \sum_{k,l} w_k w_l A(\mu_k - \mu_l, \sigma_k^2 + \sigma_l^2)

    with :math:`A(m, s^2) = E|N(m, s^2)| = 2 s \varphi(m/s) + m (2 \Phi(m/s) - 1)`. The second term is also
    :math:`\int F (1 - F)\,dx`, of which a sum at steps of half the smallest σ gives all digits: the integrand is as
    smooth as the normals are. It is taken where it has fewer terms, as with many draws of nearly the same noise; then
    time grows with K, and elsewhere with K². Memory does not grow.

    Args:
        loc: Means, ``(K, ...)``.
        scale: Standard deviations, ``(K, ...)``; zero is a point mass.
        log_weights: Normalised log weights, ``(K,)``.
        y: Observed outcomes, ``(...)``.

    Returns:
        The score of each outcome, shaped like ``y``.
    """
    count = loc.shape[0]
    size = max(1, _CHUNK // count)
    locs = loc.reshape(count, -1).split(size, 1)
    scales = scale.expand_as(loc).reshape(count, -1).split(size, 1)
    weights = log_weights.exp().unsqueeze(1)  # (K, 1)
    chunks = zip(locs, scales, y.reshape(-1).split(size), strict=True)
    return torch.cat([_normal_mixture_chunk(m, s, each, weights) for m, s, each in chunks]).view(y.shape)


def _normal_mixture_chunk(loc: Tensor, scale: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    near = (weights * _mean_absolute_normal(y - loc, scale.square())).sum(0)
    low, high = (loc - _REACH * scale).amin(0), (loc + _REACH * scale).amax(0)
    terms = ((high - low) / (_SPACING * scale.amin(0))).max().item()  # infinite or NaN with point masses
    if terms < 2 * loc.shape[0]:
        return near - _spread_by_sum(loc, scale, weights, low, high, math.ceil(terms))
    return near - _spread_by_pairs(loc, scale, weights)


def _spread_by_pairs(loc: Tensor, scale: Tensor, weights: Tensor) -> Tensor:
    """E|X - X'| / 2 of mixtures ``(K, rows)``, pair by pair."""
    variance = scale.square()
    total = (weights.square() * scale).sum(0) / math.sqrt(math.pi)  # half of the pairs k = l: A(0, 2 σ²) = 2 σ / √π
    for k in range(loc.shape[0] - 1):  # the pairs k < l stand for both orders
        pairs = _mean_absolute_normal(loc[k] - loc[k + 1 :], variance[k] + variance[k + 1 :])
        total = total + weights[k] * (weights[k + 1 :] * pairs).sum(0)
    return total


def _spread_by_sum(loc: Tensor, scale: Tensor, weights: Tensor, low: Tensor, high: Tensor, terms: int) -> Tensor:
    """The same as the integral of F (1 - F), by the trapezoidal rule between ends where it is negligible."""
    total, step = torch.zeros_like(low), (high - low) / terms
    inverse = scale.reciprocal() * math.sqrt(0.5)
    offset = (low - loc) * inverse
    for k in range(1, terms):
        below = (weights * torch.erf(torch.addcmul(offset, inverse, k * step))).sum(0)  # 2 F - 1
        total += 1 - below.square()
    return 0.25 * step * total


def _mean_absolute_normal(mean: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, variance)."""
    scale = variance.sqrt()
    z = mean / (scale * math.sqrt(2.0)).clamp_min(torch.finfo(scale.dtype).tiny)
    return scale * math.sqrt(2 / math.pi) * torch.exp(-z.square()) + mean * torch.erf(z)


def continuous_crps(cdf: Callable[[Tensor], Tensor], y: Tensor, scale: Tensor) -> Tensor:
    r"""CRPS from any distribution function, by adaptive integration on both sides of the outcome.

    The real line is mapped to (-1, 1) by x = y + s t / (1 - t²), which works for heavy tails too; the estimated error
    is brought below :data:`TOLERANCE` times s.

    Args:
        cdf: The CDFs of all outcomes at once, elementwise.
        y: Observed outcomes.
        scale: The distance s from ``y`` within which each CDF rises.

    Returns:
        The score of each outcome, shaped like ``y``.
    """

    def integrand(t: Tensor) -> Tensor:
        below = cdf(y + scale * t / (1 - t * t))
        return torch.where(t < 0, below, 1 - below).square() * _jacobian(t)

    return scale * _integrate(integrand, y)


def count_crps(cdf: Callable[[Tensor], Tensor], y: Tensor, mean: Tensor, std: Tensor, scale: Tensor) -> Tensor:
    r"""CRPS of distributions over counts: :math:`\sum_{k \ge 0} (F(k) - 1\{k \ge y\})^2`.

    Distributions that spread over more than 512 counts are integrated instead, as in :func:`continuous_crps`.

    Args:
        cdf: The CDFs of all outcomes at once, elementwise.
        y: Observed counts.
        mean: Means of the distributions.
        std: Standard deviations.
        scale: As for :func:`continuous_crps`.

    Returns:
        The score of each outcome, shaped like ``y``.
    """
    low, high = _count_range(cdf, mean, std)
    wide = high - low >= _MOST_TERMS
    if wide.all():
        return _wide_count_crps(cdf, y, scale)
    summed = _narrow_count_crps(cdf, y, low, torch.where(wide, low, high))
    return torch.where(wide, _wide_count_crps(cdf, y, scale), summed) if wide.any() else summed


def _count_range(cdf: Callable[[Tensor], Tensor], mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """The counts outside of which the CDF is 0 or 1 to within 1e-7."""
    reach = 6 * std + 6
    for _ in range(60):
        low, high = (mean - reach).floor().clamp_min(0.0), (mean + reach).ceil()
        short = ((low > 0) & (cdf(low) > 1e-7)) | (cdf(high) < 1 - 1e-7)
        if not short.any():
            break
        reach = torch.where(short, 1.5 * reach, reach)
    return low, high


def _narrow_count_crps(cdf: Callable[[Tensor], Tensor], y: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The sum over counts from low to high, and the terms of 1 between that range and the outcome."""
    score = (y - 1 - high).clamp_min(0.0) + (low - y).clamp_min(0.0)
    for step in range(int((high - low).max().item()) + 1):
        k = low + step
        score = score + torch.where(k <= high, (cdf(k) - (k >= y).to(y.dtype)).square(), 0.0)
    return score


def _wide_count_crps(cdf: Callable[[Tensor], Tensor], y: Tensor, scale: Tensor) -> Tensor:
    """The sum over counts as an integral: linear interpolation between counts, corrected to the trapezoidal rule.

    For values a and b at neighbouring counts, ∫ ((1-f) a + f b)² df = (a² + b²)/2 - (a - b)²/6.
    """

    def integrand(t: Tensor) -> Tensor:
        left = t < 0
        x = torch.where(left, y - 1, y) + scale * t / (1 - t * t)
        k = x.floor()
        a, b = (torch.where(left, below, 1 - below) for below in (_count_cdf(cdf, k), _count_cdf(cdf, k + 1)))
        cell = torch.lerp(a, b, x - k).square() + (a - b).square() / 6
        return cell * _jacobian(t)

    # the trapezoidal rule counts the two end points by half
    ends = _count_cdf(cdf, y - 1).square() + (1 - _count_cdf(cdf, y)).square()
    return scale * _integrate(integrand, y) + ends / 2


def _count_cdf(cdf: Callable[[Tensor], Tensor], k: Tensor) -> Tensor:
    return torch.where(k < 0, 0.0, cdf(k.clamp_min(0.0)))


def _jacobian(t: Tensor) -> Tensor:
    """The derivative of t / (1 - t²)."""
    return (1 + t * t) / (1 - t * t).square()


# Gauss-Kronrod rule of 15 points with its embedded Gauss rule of 7 (Kronrod, 1965): node, weight, weight in the latter.
_RULE = (
    (0.991455371120812639, 0.022935322010529225, 0.0),
    (0.949107912342758525, 0.063092092629978553, 0.129484966168869693),
    (0.864864423359769073, 0.104790010322250184, 0.0),
    (0.741531185599394440, 0.140653259715525919, 0.279705391489276668),
    (0.586087235467691130, 0.169004726639267903, 0.0),
    (0.405845151377397167, 0.190350578064785410, 0.381830050505118945),
    (0.207784955007898468, 0.204432940075298892, 0.0),
    (0.0, 0.209482141084727828, 0.417959183673469388),
)
_START = (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0)


def _integrate(f: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """∫ f(t) dt over (-1, 1), elementwise: in every step each element splits its own worst panel."""
    edges = [torch.full_like(like, edge) for edge in _START]
    left, right = torch.stack(edges[:-1]), torch.stack(edges[1:])  # (panels, ...)
    value, error = map(torch.stack, zip(*(_panel(f, a, b) for a, b in zip(left, right, strict=True)), strict=True))
    for _ in range(_MOST_SPLITS):
        if error.sum(0).max() <= TOLERANCE:
            break
        worst = error.argmax(0, keepdim=True)
        a, b = left.gather(0, worst), right.gather(0, worst)
        middle = (a + b) / 2
        lower, upper = _panel(f, a[0], middle[0]), _panel(f, middle[0], b[0])
        right = torch.cat((right.scatter(0, worst, middle), b))
        left = torch.cat((left, middle))
        value = torch.cat((value.scatter(0, worst, lower[0].unsqueeze(0)), upper[0].unsqueeze(0)))
        error = torch.cat((error.scatter(0, worst, lower[1].unsqueeze(0)), upper[1].unsqueeze(0)))
    return value.sum(0)


def _panel(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The integral from a to b, and the difference between the two rules as the estimate of its error."""
    centre, half = (a + b) / 2, (b - a) / 2
    fine, coarse = torch.zeros_like(a), torch.zeros_like(a)
    for node, weight, coarse_weight in _RULE:
        both = f(centre + half * node) + (f(centre - half * node) if node else 0.0)
        fine, coarse = fine + weight * both, coarse + coarse_weight * both
    return half * fine, half * (fine - coarse).abs()
