r"""Log-normal distributions of squared scales, and their divergence from the two parts of a half-Cauchy prior.

The square of a half-Cauchy variable is the product of a gamma and an inverse gamma variable (Louizos, Ullrich and
Welling, 2017; Neville, Ormerod and Wand, 2014):

.. math:: \alpha \sim \mathrm{Gamma}(\tfrac12, 1),\; \beta \sim \mathrm{InverseGamma}(\tfrac12, 1)
    \quad\Rightarrow\quad \sqrt{\alpha\beta} \sim C^+(0, 1)

With a log-normal posterior for each part, both divergences are in closed form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_CONSTANT = 0.5 * (1 + math.log(2))


def divergence_from_gamma(loc: Tensor, log_scale: Tensor) -> Tensor:
    r"""KL from Gamma(½, 1) of a log-normal whose log has this mean and log standard deviation, elementwise.

    .. math:: e^{\mu + \sigma^2 / 2} - \tfrac12 \big(\mu + 2 \log\sigma + 1 + \log 2\big)
    """
    return torch.exp(loc + 0.5 * torch.exp(2 * log_scale)) - 0.5 * loc - log_scale - _CONSTANT


def divergence_from_inverse_gamma(loc: Tensor, log_scale: Tensor) -> Tensor:
    r"""KL from InverseGamma(½, 1), elementwise: that of the reciprocal from the gamma distribution.

    .. math:: e^{-\mu + \sigma^2 / 2} - \tfrac12 \big(-\mu + 2 \log\sigma + 1 + \log 2\big)
    """
    return divergence_from_gamma(-loc, log_scale)
