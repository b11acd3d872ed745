"""The normal prior: the default, and what a fitted Gaussian posterior becomes for the next data set."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.prior import Prior
from knowable.core.prediction.components import normal_log_prob
from knowable.core.support.checks import check_number


@dataclass(frozen=True)
class Normal(Prior):
    r"""Independent normal distributions over the elements of a parameter.

    .. math:: p(w) = \mathcal{N}(w \mid \mathrm{loc}, \mathrm{scale}^2)

    Args:
        scale: Standard deviation, above 0. The default suits networks whose inputs are standardised.
        loc: Mean.

    Example:
        >>> Normal(2.0).normal_moments()
        (0.0, 0.25)
    """

    scale: Scale = 1.0
    loc: Scale = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_scale("scale", self.scale))
        if not isinstance(self.loc, Tensor):
            object.__setattr__(self, "loc", check_number("loc", self.loc))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each element."""
        return normal_log_prob(value, self.loc, self.scale)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        """Draw a tensor of ``shape``."""
        noise = torch.randn(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)
        return self.loc + self.scale * noise

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor:
        r"""KL from a normal, in closed form.

        .. math:: \sum \tfrac{1}{2}\Big(\frac{s^2 + (m - \mathrm{loc})^2}{\mathrm{scale}^2} - 1\Big)
            - \log\frac{s}{\mathrm{scale}}
        """
        ratio = scale / self.scale
        distance = (loc - self.loc) / self.scale
        return (0.5 * (ratio.square() + distance.square() - 1.0) - ratio.log()).sum()

    def normal_moments(self) -> tuple[Scale, Scale]:
        """Mean and precision."""
        return self.loc, 1.0 / self.scale**2


# --- The scale field that priors share: a positive number, or a tensor when it is learned ----------------------------

Scale = float | Tensor
"""A positive scale. Users give a number; a learned scale is a tensor."""


def check_scale(name: str, value: Any) -> Scale:
    """Return ``value`` as a positive float; a tensor is a learned scale, positive by construction, and passes."""
    return value if isinstance(value, Tensor) else check_number(name, value, above=0.0)


def log_of(scale: Scale) -> Scale:
    """The logarithm of a scale, of the same kind."""
    return scale.log() if isinstance(scale, Tensor) else math.log(scale)
