"""The horseshoe prior: almost all weights vanish, the others are left alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.checks import check_number
from knowable.core.prior import Prior
from knowable.priors._exponential_integral import log_scaled_exponential_integral


@dataclass(frozen=True)
class Horseshoe(Prior):
    r"""A normal whose scale is half-Cauchy, with the scale integrated out (Carvalho et al., 2010).

    .. math:: w \mid \lambda \sim \mathcal{N}(0, \lambda^2 \tau^2), \quad \lambda \sim C^+(0, 1), \qquad
        p(w) = \frac{e^{z} E_1(z)}{\tau \sqrt{2 \pi^3}}, \quad z = \frac{w^2}{2 \tau^2}

    The density is infinite at zero (logarithmically) and its tails fall like :math:`1 / w^2`. At a weight of exactly
    zero the log density given here is large but finite, with gradient zero.

    Args:
        scale: The global scale :math:`\tau`, above 0.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_number("scale", self.scale, above=0.0))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each element."""
        z = 0.5 * (value / self.scale).square()
        constant = -math.log(self.scale) - 0.5 * math.log(2 * math.pi**3)
        return constant + log_scaled_exponential_integral(z)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        """Draw a tensor of ``shape``: a half-Cauchy scale times a normal."""
        shape = tuple(shape)
        uniform = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device)
        noise = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return self.scale * torch.tan(0.5 * math.pi * uniform) * noise
