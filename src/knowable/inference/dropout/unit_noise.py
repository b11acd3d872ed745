"""Noise on whole units: one positive random factor for each input of a layer, whose distribution is learned.

Two priors, which both want most units to vanish:

- the log-uniform one, on an interval, with a truncated log-normal posterior (Neklyudov et al., 2017);
- the Horseshoe, a product of half-Cauchy scales of the layer and of each unit, with log-normal posteriors of their
  gamma and inverse gamma parts (Louizos, Ullrich and Welling, 2017).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.inference.dropout.truncated_log_normal import (
    divergence_from_log_uniform,
    draw_log_noise,
    mean_and_relative_variance,
)

_NARROWEST, _WIDEST = 1e-4, 10.0  # of the truncated log-normal's scale; the second in lengths of the interval


class GroupNoise(nn.Module, ABC):
    """The factors of one layer's inputs: how they are distributed, and how far that is from the prior."""

    @abstractmethod
    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Factors ``(rows, units)``, differentiable; from the global generator if none is given."""

    def divergence(self) -> Tensor:
        """KL(q ‖ p), summed over units."""
        return self.total_divergence([self])

    @classmethod
    @abstractmethod
    def total_divergence(cls, noises: Sequence[Any]) -> Tensor:
        """The divergence of all units of several layers, in one go."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean of every factor, and its variance over the squared mean; both ``(units,)``."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Plain values that make another one, beside its tensors."""

    def log_prior_scale(self) -> Tensor | None:
        """Logs ``(units,)`` of the weights' standard deviation under their prior, where that is part of the noise."""
        return None

    def settle(self) -> None:
        """Called after every step: put back what has left the range in which it means something."""


class LogUniformNoise(GroupNoise):
    r"""Truncated log-normal factors in :math:`[e^{-a}, 1]`, under the log-uniform prior on the same interval.

    Args:
        units: How many there are.
        span: a, the length of the interval: the factors' logarithm lies between -a and 0.
        initial_scale: Standard deviation of the logarithm to begin with, at a location of 0.
        like: A tensor of the type and device to use.
    """

    def __init__(self, units: int, *, span: float, initial_scale: float = 0.02, like: Tensor):
        super().__init__()
        self.span = span
        self.loc = nn.Parameter(like.new_zeros(units))
        self.log_scale = nn.Parameter(like.new_full((units,), math.log(initial_scale)))

    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Factors ``(rows, units)``, by the inverse CDF."""
        uniform = torch.rand(
            (rows, len(self.loc)), generator=generator, dtype=torch.float64, device=self.loc.device
        )  # fmt: skip
        return draw_log_noise(self.loc, self.log_scale.exp(), -self.span, 0.0, uniform).exp()

    @classmethod
    def total_divergence(cls, noises: Sequence[LogUniformNoise]) -> Tensor:
        """In closed form; all have the same interval."""
        loc, log_scale = (torch.cat([getattr(each, part) for each in noises]) for part in ("loc", "log_scale"))
        return divergence_from_log_uniform(loc, log_scale.exp(), -noises[0].span, 0.0).sum()

    def moments(self) -> tuple[Tensor, Tensor]:
        """In closed form."""
        return mean_and_relative_variance(self.loc, self.log_scale.exp(), -self.span, 0.0)

    def settings(self) -> dict[str, Any]:
        """The interval."""
        return {"prior": "log_uniform", "span": self.span}

    @torch.no_grad()
    def settle(self) -> None:
        """The location at most a length of the interval outside it, the scale at most ten lengths.

        Beyond, the distribution is a point or the prior, and nothing would pull it back.
        """
        self.loc.clamp_(-2 * self.span, self.span)
        self.log_scale.clamp_(math.log(_NARROWEST), math.log(_WIDEST * self.span))


class HorseshoeNoise(GroupNoise):
    r"""Factors that are products of two half-Cauchy scales, one of the layer and one of the unit.

    .. math:: z_i = \tau_0 \sqrt{s_a s_b\, \alpha_i \beta_i}, \qquad s_a, \alpha_i \sim \mathrm{Gamma}(\tfrac12, 1),
        \quad s_b, \beta_i \sim \mathrm{InverseGamma}(\tfrac12, 1)

    with independent log-normal posteriors. All units of a draw share its :math:`s_a` and :math:`s_b`.

    What is drawn is :math:`z_i / \bar z_i`, with the median :math:`\bar z_i` of the factor taken out and given to the
    weights: :math:`w_{ij} = z_i v_{ij}` with :math:`v_{ij} \sim \mathcal{N}(0, 1)` a priori is
    :math:`(z_i / \bar z_i)\, u_{ij}` with :math:`u_{ij} \sim \mathcal{N}(0, \bar z_i^2)`. It is the same distribution.
    But in these coordinates the likelihood does not see the medians, and the divergence alone, which is exact, moves
    them; else a factor and the width of its weights would have to move against each other in step.

    Args:
        units: How many there are.
        global_scale: :math:`\tau_0`.
        initial_scale: Standard deviation of the logarithm of every part to begin with.
        initial_median: Where the medians begin.
        like: A tensor of the type and device to use.
    """

    def __init__(
        self, units: int, *, global_scale: float, initial_scale: float = 0.02, initial_median: float = 1.0, like: Tensor
    ):
        super().__init__()
        self.global_scale = global_scale
        lift = 2 * math.log(initial_median / global_scale)
        begin = [0.0, lift] if lift > 0 else [lift, 0.0]  # the part that has a tail on this side
        self.global_loc = nn.Parameter(like.new_tensor(begin))  # of log s_a and log s_b
        self.global_log_scale = nn.Parameter(like.new_full((2,), math.log(initial_scale)))
        self.loc = nn.Parameter(like.new_zeros(2, units))  # of log α and log β
        self.log_scale = nn.Parameter(like.new_full((2, units), math.log(initial_scale)))

    def draw(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        """Factors ``(rows, units)`` over their medians: half the sum of all logarithms, which are normal."""
        noise = torch.randn(
            (rows, 1 + self.loc.shape[1]), generator=generator, dtype=self.loc.dtype, device=self.loc.device
        )  # fmt: skip
        of_layer, of_unit = self._log_variances()
        return torch.exp(of_layer.sqrt() * noise[:, :1] + of_unit.sqrt() * noise[:, 1:])

    @classmethod
    def total_divergence(cls, noises: Sequence[HorseshoeNoise]) -> Tensor:
        """In closed form, of all four parts."""
        loc = torch.cat([part for each in noises for part in (each.global_loc.unsqueeze(1), each.loc)], 1)
        log_scale = torch.cat(
            [part for each in noises for part in (each.global_log_scale.unsqueeze(1), each.log_scale)], 1
        )
        found = divergence_from_gamma(loc[0], log_scale[0]) + divergence_from_inverse_gamma(loc[1], log_scale[1])
        return found.sum()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Of the log-normal product over its median."""
        of_layer, of_unit = self._log_variances()
        variance = of_layer + of_unit
        return torch.exp(0.5 * variance), torch.expm1(variance)

    def settings(self) -> dict[str, Any]:
        """The scale of the global half-Cauchy distribution."""
        return {"prior": "horseshoe", "global_scale": self.global_scale}

    def log_prior_scale(self) -> Tensor:
        """Log medians of the factors."""
        return math.log(self.global_scale) + 0.5 * (self.global_loc.sum() + self.loc.sum(0))

    def _log_variances(self) -> tuple[Tensor, Tensor]:
        """Variances of log z: what the units share, and what each has of its own."""
        return 0.25 * torch.exp(2 * self.global_log_scale).sum(), 0.25 * torch.exp(2 * self.log_scale).sum(0)


# --- Log-normal distributions of squared scales, and their divergence from the two parts of a half-Cauchy prior ------
#
# The square of a half-Cauchy variable is the product of a gamma and an inverse gamma variable (Louizos, Ullrich and
# Welling, 2017; Neville, Ormerod and Wand, 2014):
#
# .. math:: \alpha \sim \mathrm{Gamma}(\tfrac12, 1),\; \beta \sim \mathrm{InverseGamma}(\tfrac12, 1)
#     \quad\Rightarrow\quad \sqrt{\alpha\beta} \sim C^+(0, 1)
#
# With a log-normal posterior for each part, both divergences are in closed form.

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
