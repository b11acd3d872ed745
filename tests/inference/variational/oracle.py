"""What is known in closed form, or by numerical integration, about a mean-field Gaussian."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

import knowable as kn
from knowable.core.model.prior import Prior
from knowable.testing import LinearGaussian


def expected_log_likelihood(problem: LinearGaussian, loc: Tensor, std: Tensor) -> float:
    """E_q[log p(y | θ)]: the log likelihood at the mean, less the variance of the fit over twice the noise variance."""
    design, residual = problem.design, problem.y[:, 0].double() - problem.design @ loc
    squares = residual.square().sum() + (design.square() @ std.square()).sum()
    n = len(design)
    return -0.5 * squares.item() / problem.noise**2 - n * math.log(problem.noise) - 0.5 * n * math.log(2 * math.pi)


def loss_gradient(problem: LinearGaussian, loc: Tensor, std: Tensor) -> Tensor:
    """Gradient of -ELBO / N in all means, then all log standard deviations."""
    precision = problem.precision
    by_loc = precision @ (loc - problem.mean)
    by_log_std = precision.diagonal() * std.square() - 1
    return torch.cat([by_loc, by_log_std]) / len(problem.x)


def integrated_kl(prior: Prior, loc: float, std: float) -> float:
    """KL(N(loc, std²) ‖ prior) by tanh-sinh quadrature, split at 0 where some priors have a corner or a pole."""
    ends = {loc - 10 * std, loc - 2 * std, loc, loc + 2 * std, loc + 10 * std}
    ends |= {0.0} if abs(loc) < 10 * std else set()
    total = 0.0
    for low, high in itertools.pairwise(sorted(ends)):
        w, weight = _tanh_sinh(low, high)
        log_q = -0.5 * ((w - loc) / std) ** 2 - math.log(std) - 0.5 * math.log(2 * math.pi)
        total += (weight * log_q.exp() * (log_q - prior.log_prob(w))).sum().item()
    return total


def _tanh_sinh(low: float, high: float, step: float = 0.04) -> tuple[Tensor, Tensor]:
    """Nodes and weights of the double-exponential rule, which no singularity at an end can hurt."""
    t = torch.arange(-3.4, 3.4, step, dtype=torch.float64)
    u = 0.5 * math.pi * torch.sinh(t)
    distance = 1 / (1 + torch.exp(2 * u))  # from the upper end, as a share of the length
    weight = step * 0.25 * math.pi * torch.cosh(t) / torch.cosh(u) ** 2
    nodes = torch.where(t < 0, low + (high - low) / (1 + torch.exp(-2 * u)), high - (high - low) * distance)
    return nodes, (high - low) * weight


def flat_moments(problem: LinearGaussian, posterior: kn.DiagonalNormal) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of a fit, in the order of the problem's own flat vectors."""
    return problem.as_flat(posterior.loc), problem.as_flat(posterior.scale)
