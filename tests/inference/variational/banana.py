"""A model of two weights whose posterior is bent like a banana, and all that can be known of it by integration."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.prior import normal_log_prob

DTYPE = torch.float64
_LOW, _HIGH, _COUNT = torch.tensor([-8.0, -10.0]), torch.tensor([8.0, 6.0]), 321


class Bent(nn.Module):
    """b + a² / 2, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.3, 0.2], dtype=DTYPE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w[1] + 0.5 * self.w[0].square()).expand(len(x), 1)


@dataclass(frozen=True)
class Banana:
    r"""Four rows that say what b + a² / 2 is, and nothing else.

    .. math:: a, b \sim N(0, s^2), \qquad y_i \mid a, b \sim N(b + \tfrac12 a^2, \sigma^2)
    """

    y: Tensor
    noise: float = 0.8
    prior_scale: float = 1.5

    @classmethod
    def make(cls, seed: int) -> Banana:
        """Four observations of about 0.5."""
        noise = torch.randn(4, 1, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)
        return cls(0.5 + 0.8 * (noise - noise.mean()))

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(self.y), 1, dtype=DTYPE), self.y

    def model(self) -> kn.Model:
        return kn.Model(Bent(), kn.Gaussian(self.noise), kn.Normal(self.prior_scale))

    # --- by integration over a grid ----------------------------------------------------------------------------------

    def log_joint(self, w: Tensor) -> Tensor:
        """Log p(D, θ) of ``w`` ``(n, 2)``."""
        prior = normal_log_prob(w, 0.0, self.prior_scale).sum(-1)
        return prior + normal_log_prob(self.y, w[:, 1] + 0.5 * w[:, 0].square(), self.noise).sum(0)

    @functools.cached_property
    def log_evidence(self) -> float:
        values, area = grid()
        return self.log_joint(values).logsumexp(0).item() + math.log(area)

    def divergence(self, posterior: kn.Posterior) -> float:
        """KL(q ‖ posterior), for a q with a density, all of which is on the grid."""
        values, area = grid()
        with torch.no_grad():
            log_q = posterior.log_prob({"w": values})
        assert abs(log_q.exp().sum().item() * area - 1) < 0.02
        return (log_q.exp() * (log_q - self.log_joint(values) + self.log_evidence)).sum().item() * area


@functools.cache
def grid() -> tuple[Tensor, float]:
    """Points ``(n, 2)`` that cover the posterior, and the area that each stands for."""
    axes = [torch.linspace(low, high, _COUNT, dtype=DTYPE) for low, high in zip(_LOW, _HIGH, strict=True)]
    return torch.cartesian_prod(*axes), math.prod((axis[1] - axis[0]).item() for axis in axes)
