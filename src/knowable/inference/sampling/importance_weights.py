r"""Pareto smoothing of importance weights (Vehtari, Simpson, Gelman, Yao and Gabry, 2024).

The largest weights of any importance sampler follow, in the limit, a generalised Pareto distribution. Its shape k says
how heavy their tail is: weights have 1/k finite moments. Replacing the largest weights by the expected order statistics
of the fitted distribution makes estimates steadier, and k says whether they can be trusted at all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knowable.core.posterior.particles import systematic_indices

_FEWEST = 5  # weights in a tail that can be fitted
_PRIOR_WEIGHT = 10  # k is drawn towards a half as by this many weights


def smooth_weights(log_weights: Tensor) -> tuple[Tensor, float]:
    r"""Pareto-smoothed importance weights and the shape of their tail.

    The :math:`M = \lfloor \min(S/5, 3\sqrt S) \rfloor` largest weights are replaced by

    .. math:: \tilde w_z = F^{-1}\!\Big(\frac{z - \frac12}{M}\Big), \qquad z = 1, \dots, M

    of the generalised Pareto distribution F fitted to them, and no weight exceeds the largest one there was.

    Args:
        log_weights: Log weights ``(S,)`` on any scale; -inf for a weight of zero.

    Returns:
        Smoothed log weights on the same scale, in the same order, in double precision; and k. Where there are too few
        weights to tell (S < 25) k is nan, where a few dominate it is infinite, and the weights are as they
        were.
    """
    log_weights = log_weights.detach().double()
    count = tail_length(len(log_weights))
    top = log_weights.max()
    if count < _FEWEST or not torch.isfinite(top):
        return log_weights, math.nan
    order = log_weights.argsort(stable=True)
    tail = order[-count:]
    weights = (log_weights[tail] - top).exp()  # the largest is one
    cutoff = (log_weights[order[-count - 1]] - top).exp()
    if weights[0] == weights[-1]:  # all the same: nothing to smooth, and no tail
        return log_weights, -math.inf
    if weights[max(0, int(count / 4 + 0.5) - 1)] == 0:  # beside the largest most are nothing at all
        return log_weights, math.inf
    k, scale = fit_generalised_pareto(weights - cutoff)
    if not (math.isfinite(k) and math.isfinite(scale) and scale > 0):
        return log_weights, k if math.isfinite(k) else math.inf
    share = (torch.arange(count, dtype=torch.float64, device=weights.device) + 0.5) / count
    smoothed = log_weights.clone()
    smoothed[tail] = (cutoff + pareto_quantile(share, k, scale)).clamp_max(1.0).log() + top
    return smoothed, k


def tail_length(count: int) -> int:
    """How many of ``count`` weights make up the tail."""
    return math.floor(3 * math.sqrt(count)) if count > 225 else count // 5


def largest_safe_k(count: int) -> float:
    r"""The k beyond which ``count`` draws are too few: :math:`\min(1 - 1/\log_{10} S,\, 0.7)`."""
    return min(1 - 1 / math.log10(max(count, 2)), 0.7)


def fit_generalised_pareto(exceedances: Tensor) -> tuple[float, float]:
    r"""Shape k and scale σ of a generalised Pareto distribution (Zhang and Stephens, 2009).

    The posterior mean of b = -k/σ under their data-driven prior, on a grid of the profile likelihood,

    .. math:: \hat k(b) = \frac1n \sum_i \log(1 - b x_i), \qquad
        \ell(b) = n \big(\log(-b / \hat k(b)) - \hat k(b) - 1\big)

    and then k, positive for heavy tails, with a weak prior that draws it towards a half. ``exceedances`` are sorted.
    """
    x = exceedances.double()
    n = len(x)
    quarter = x[max(0, int(n / 4 + 0.5) - 1)]
    if quarter <= 0:  # ties with the cutoff
        quarter = x[x > 0][0]
    points = 30 + int(math.sqrt(n))
    number = torch.arange(1, points + 1, dtype=torch.float64, device=x.device)
    b = (1 - torch.sqrt(points / (number - 0.5))) / (3 * quarter) + 1 / x[-1]
    k = torch.log1p(-b[:, None] * x).mean(1)
    likelihood = n * (torch.log(-b / k) - k - 1)
    weights = likelihood.softmax(0)
    weights = torch.where(weights >= 10 * torch.finfo(torch.float64).eps, weights, 0.0)
    best = (b * weights / weights.sum()).sum()
    shape = torch.log1p(-best * x).mean()
    scale = -shape / best
    return ((n * shape + 0.5 * _PRIOR_WEIGHT) / (n + _PRIOR_WEIGHT)).item(), scale.item()


def pareto_quantile(share: Tensor, k: float, scale: float) -> Tensor:
    r"""Quantiles of a generalised Pareto distribution: :math:`\sigma \big((1-p)^{-k} - 1\big) / k`."""
    if abs(k) < 1e-12:
        return -scale * torch.log1p(-share)
    return scale * torch.expm1(-k * torch.log1p(-share)) / k


def effective_sample_size(log_weights: Tensor) -> float:
    r"""Effective sample size of weighted draws (Kish, 1965): :math:`1 / \sum_s \bar w_s^2`."""
    return (2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp().item()


def systematic_resample(log_weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Indices ``(count,)``, in order, by systematic resampling (Kitagawa, 1996): each as often as its weight says."""
    offset = torch.rand((), generator=generator, dtype=torch.float64).item()
    return systematic_indices(log_weights.softmax(0), count, offset).to(log_weights.device)


def effective_sample_sizes(position: Tensor, log_weights: Tensor) -> Tensor:
    r"""Effective sample sizes of weighted draws ``(n, D)`` for the mean of each coordinate, ``(D,)``.

    .. math:: \frac{\sum_s \bar w_s (\theta_s - \mu)^2}{\sum_s \bar w_s^2 (\theta_s - \mu)^2}
    """
    weights = log_weights.softmax(0)
    squares = (position.double() - weights @ position.double()).square()
    return (weights @ squares) / (weights.square() @ squares)
