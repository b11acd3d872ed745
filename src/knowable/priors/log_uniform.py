"""The log-uniform prior, which makes variational dropout sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.model.prior import Prior

K1, K2, K3 = 0.63576, 1.87320, 1.48695  # the fit of Molchanov et al. (2017), equation 14


def divergence_at(log_alpha: Tensor) -> Tensor:
    """KL from a normal whose variance is alpha times its squared mean, elementwise; see :class:`LogUniform`."""
    bulk = K1 * torch.sigmoid(-K3 * log_alpha - K2)
    return bulk + 0.5 * torch.logaddexp(-log_alpha, torch.zeros_like(log_alpha))


@dataclass(frozen=True, repr=False)
class LogUniform(Prior):
    r"""The improper prior that is uniform in :math:`\log |w|` (Kingma et al., 2015; Molchanov et al., 2017).

    .. math:: p(w) \propto 1 / |w|

    It does not change when the weight is rescaled, so only the ratio of noise to weight matters: a weight drowned in
    its own noise costs nothing and can be removed. It cannot be sampled, and has no mode: at zero it is infinite.
    """

    proper: ClassVar[bool] = False

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each element, up to the improper prior's constant; infinite at zero."""
        return -value.abs().log()

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor:
        r"""KL from a normal, up to the improper prior's constant, by the fit of Molchanov et al. (2017).

        .. math:: \sum k_1 \sigma(-k_2 - k_3 \log \alpha) + \tfrac{1}{2} \log(1 + \alpha^{-1}), \qquad
            \alpha = s^2 / m^2

        The constant is chosen so that it goes to 0 as :math:`\alpha \to \infty`; each element is within 0.01
        nat of the exact value. This is the paper's expression with :math:`k_1 - k_1 \sigma(x)` written as
        :math:`k_1 \sigma(-x)`, which keeps its digits at both ends.
        """
        smallest = torch.finfo(loc.dtype).tiny  # a mean of exactly 0 costs 0, with gradient 0
        return divergence_at(2.0 * (scale.log() - loc.abs().clamp_min(smallest).log())).sum()
