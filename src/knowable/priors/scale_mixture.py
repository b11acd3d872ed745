"""The scale mixture of two normals: a spike and a slab."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.prior import Prior
from knowable.core.prediction.components import normal_log_prob
from knowable.core.support.checks import check_number


@dataclass(frozen=True, repr=False)
class ScaleMixture(Prior):
    r"""A wide and a narrow normal mixed: many weights near zero, the others free (Blundell et al., 2015).

    .. math:: p(w) = \pi\, \mathcal{N}(w \mid 0, \sigma_1^2) + (1 - \pi)\, \mathcal{N}(w \mid 0, \sigma_2^2)

    Args:
        pi: Share of the first normal, between 0 and 1.
        scale1: Its standard deviation; the default is wide.
        scale2: Standard deviation of the second; the default is about :math:`e^{-6}`, the widest of the paper's.
    """

    pi: float = 0.5
    scale1: float = 1.0
    scale2: float = 0.0025

    def __post_init__(self) -> None:
        object.__setattr__(self, "pi", check_number("pi", self.pi, above=0.0, below=1.0))
        object.__setattr__(self, "scale1", check_number("scale1", self.scale1, above=0.0))
        object.__setattr__(self, "scale2", check_number("scale2", self.scale2, above=0.0))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each element."""
        first = math.log(self.pi) + normal_log_prob(value, 0.0, self.scale1)
        second = math.log1p(-self.pi) + normal_log_prob(value, 0.0, self.scale2)
        return torch.logaddexp(first, second)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        """Draw a tensor of ``shape``."""
        shape = tuple(shape)
        noise = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        first = torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device) < self.pi
        return torch.where(first, self.scale1 * noise, self.scale2 * noise)
