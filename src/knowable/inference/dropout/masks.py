r"""Masks: zeros and ones, or numbers in between that can be differentiated in the rate.

.. math:: z \sim \mathrm{Bernoulli}(1 - p) \qquad\text{or}\qquad
    \tilde z = \mathrm{sigmoid}\Big(\frac1t \Big(\log\frac{1-p}{p} + \log\frac{u}{1-u}\Big)\Big), \quad
    u \sim \mathrm{Uniform}(0, 1)

The second is the Concrete relaxation (Maddison et al., 2017; Jang et al., 2017; for dropout Gal, Hron and Kendall,
2017). It falls on the same side of ½ as z would, and becomes z as t goes to 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.support.randomness import fast_keep

_SMALLEST = 1e-7  # distance of u from 0 and 1


def hard_mask(rows: int, units: int, rate: float, *, like: Tensor) -> Tensor:
    """Zeros and ones ``(rows, units)``, from the global generator."""
    return fast_keep(rows, units, rate, like=like)


def relaxed_mask(rows: int, units: int, logit: Tensor, relaxation: float) -> Tensor:
    """Numbers between 0 and 1 ``(rows, units)``, differentiable in the logit of the rate."""
    uniform = torch.rand((rows, units), dtype=logit.dtype, device=logit.device)
    return torch.sigmoid((uniform.logit(eps=_SMALLEST) - logit) / relaxation)


def log_probability(mask: Tensor, logit: Tensor) -> Tensor:
    """Log probability of hard masks ``(..., units)``, summed over units, as a function of the logit of the rate."""
    kept = mask.sum(-1)
    return -F.softplus(logit) * kept - F.softplus(-logit) * (mask.shape[-1] - kept)


def entropy(logit: Tensor) -> Tensor:
    r"""Entropy of one mask in nats: :math:`-p \log p - (1 - p) \log(1 - p)`."""
    rate = torch.sigmoid(logit)
    return rate * F.softplus(-logit) + (1 - rate) * F.softplus(logit)
