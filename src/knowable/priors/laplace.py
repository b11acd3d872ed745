"""The Laplace prior."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.prior import Prior, Scale, check_scale, log_of


@dataclass(frozen=True, repr=False)
class LaplacePrior(Prior):
    r"""Independent Laplace (double exponential) distributions, whose mode under data is sparse (Williams, 1995).

    .. math:: p(w) = \frac{1}{2 b} e^{-|w| / b}

    Args:
        scale: The scale :math:`b`, above 0; the standard deviation is :math:`b \sqrt{2}`.
    """

    scale: Scale = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_scale("scale", self.scale))

    def log_prob(self, value: Tensor) -> Tensor:
        return -value.abs() / self.scale - log_of(self.scale) - math.log(2.0)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        """Draw a tensor of ``shape``: the difference of two exponential draws."""
        draws = torch.empty((2, *shape), dtype=like.dtype, device=like.device).exponential_(generator=generator)
        return self.scale * (draws[0] - draws[1])

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor:
        r"""KL from a normal, in closed form.

        .. math:: \sum \frac{E|w|}{b} + \log 2b - \tfrac{1}{2} \log(2 \pi e s^2), \qquad
            E|w| = s \sqrt{2 / \pi}\, e^{-m^2 / 2 s^2} + m\, \mathrm{erf}(m / s \sqrt{2})
        """
        cross = mean_absolute(loc, scale) / self.scale + log_of(self.scale) + math.log(2.0)
        return (cross - scale.log() - 0.5 * math.log(2 * math.pi * math.e)).sum()


def mean_absolute(loc: Tensor, scale: Tensor) -> Tensor:
    """E|w| of a normal (the mean of the folded normal), elementwise."""
    distance = loc / scale
    return scale * math.sqrt(2 / math.pi) * torch.exp(-0.5 * distance.square()) + loc * torch.erf(
        distance * math.sqrt(0.5)
    )
