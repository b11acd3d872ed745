"""The log-uniform prior, which makes variational dropout sparse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.model.prior import Prior
from knowable.inference.variational.divergence import Stretch

K1, K2, K3 = 0.63576, 1.87320, 1.48695  # the fit of Molchanov et al. (2017), equation 14


def divergence_at(log_alpha: Tensor) -> Tensor:
    """KL from a normal whose variance is alpha times its squared mean, elementwise; see :class:`LogUniform`."""
    bulk = K1 * torch.sigmoid(-K3 * log_alpha - K2)
    return bulk + 0.5 * torch.logaddexp(-log_alpha, torch.zeros_like(log_alpha))


@dataclass(frozen=True)
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

    def stretch(self, start: int, stop: int) -> LogUniformStretch:
        """The same over a part of a flat buffer, with its gradient written by hand."""
        return LogUniformStretch(start, stop)


@dataclass(frozen=True)
class LogUniformStretch(Stretch):
    r"""A part of a flat buffer of means and log scales under the log-uniform prior.

    With :math:`t = \log \alpha^{-1} = 2 \log |m| - 2 \log s` and :math:`\sigma_t = \sigma(k_3 t - k_2)` the slope is

    .. math:: \frac{d\, \mathrm{KL}}{dt} = k_1 k_3\, \sigma_t (1 - \sigma_t) + \frac{1}{2} \frac{1}{1 + \alpha},
        \qquad \frac{dt}{dm} = \frac{2}{m}, \quad \frac{dt}{d \log s} = -2

    and 0 at a mean of 0. The hand-written value stays where it is once :math:`1/\alpha` leaves the range of floats.
    """

    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """The divergence, differentiable."""
        return LogUniform().kl_from_normal(loc[self.start : self.stop], scale[self.start : self.stop])

    def value_and_slopes(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The divergence and its derivatives in t over k1 k3, in as few passes over memory as there can be."""
        part = slice(self.start, self.stop)
        inverse = (loc[part] / scale[part]).square_().clamp_max_(0.1 * torch.finfo(loc.dtype).max)  # 1/alpha
        bulk = torch.add(loc.new_tensor(-K2), inverse.log(), alpha=K3).sigmoid_()  # 0 where the mean is 0
        total = K1 * bulk.sum() + 0.5 * inverse.log1p().sum()
        slopes = bulk.addcmul_(bulk, bulk, value=-1.0)
        return total, slopes.addcdiv_(inverse, inverse + 1.0, value=0.5 / (K1 * K3))

    def write_gradient(
        self, gradient: Tensor, loc: Tensor, scale: Tensor, weight: float, slopes: Tensor | None = None
    ) -> None:
        """Write ``weight`` times the derivative in ``(loc, log scale)`` into this part of ``gradient`` ``(2, D)``."""
        part = slice(self.start, self.stop)
        if slopes is None:
            slopes = self.value_and_slopes(loc, scale, scale)[1]
        by_loc, by_log_scale = gradient[0, part], gradient[1, part]
        torch.mul(slopes, -2.0 * weight * K1 * K3, out=by_log_scale)
        torch.div(by_log_scale, loc[part], out=by_loc).neg_().nan_to_num_(nan=0.0)  # 0 / 0 where the mean is 0

    def joined(self, after: Stretch) -> LogUniformStretch | None:
        """This stretch and the one right ``after`` it as one."""
        return LogUniformStretch(self.start, after.stop) if isinstance(after, LogUniformStretch) else None
