"""The normal distributions that a regression prediction mixes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prior import normal_log_prob


@dataclass
class NormalComponents:
    """One normal distribution for each posterior draw, row and output.

    Attributes:
        loc: Means, ``(K, batch, ...)``.
        scale: Standard deviations, broadcastable to ``loc``.
    """

    discrete = False

    loc: Tensor
    scale: Tensor

    @property
    def mean(self) -> Tensor:
        """The means."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """The noise variances, ``(K, batch, ...)``."""
        return self.scale.square().expand_as(self.loc)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(batch, ...)`` under each component."""
        return normal_log_prob(y, self.loc, self.scale)

    def cdf(self, y: Tensor) -> Tensor:
        """Distribution function at ``y`` ``(batch, ...)`` under each component."""
        return 0.5 * torch.erfc(math.sqrt(0.5) * (self.loc - y) / self.scale)  # erfc keeps its digits in the lower tail

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, batch, ...)``."""
        noise = torch.randn(index.shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc.gather(0, index) + self.scale.expand_as(self.loc).gather(0, index) * noise


@dataclass
class CorrelatedNormal(NormalComponents):
    """Normal components whose outputs are correlated within a row.

    Attributes:
        factor: Cholesky factor of each row's covariance, ``(rows, outputs, outputs)``.
    """

    factor: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each output given those before it in the row; their sum is the joint log density."""
        difference = (y - self.mean).reshape(*self.factor.shape[:-1], 1)
        standard = torch.linalg.solve_triangular(self.factor, difference, upper=False).squeeze(-1)
        log_scale = self.factor.diagonal(dim1=-2, dim2=-1).log()
        return (-0.5 * standard.square() - log_scale - 0.5 * math.log(2 * math.pi)).reshape(self.mean.shape)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, rows, ...)``; outputs of a row are drawn together."""
        flat = (len(index), *self.factor.shape[:-1], 1)
        noise = torch.randn(flat, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + (self.factor @ noise).reshape(index.shape)
