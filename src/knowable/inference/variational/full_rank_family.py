r"""The full-rank family: one normal with all correlations, by its Cholesky factor.

.. math:: \theta = m + s \odot (\epsilon + R\,\epsilon), \qquad \Sigma = L L^\top, \quad L = \mathrm{diag}(s)\,(I + R)

with a strictly lower triangular R. Written like this, s is the scale of each weight given the noise of those before it,
R has no unit, and one step size suits both; the entropy is that of s alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.checks import check_count
from knowable.core.model import Model
from knowable.core.normal_posterior import FullNormal
from knowable.core.params import Layout
from knowable.core.randomness import fast_randn
from knowable.errors import Unsupported
from knowable.inference.variational.divergence import HALF_LOG_TWO_PI_E
from knowable.inference.variational.family import Drawn, Family, FamilyModule

_PATH_BELOW = 500  # weights; beyond it D² noisy gradients of R outweigh what they cancel


@dataclass(frozen=True)
class FullRank(Family):
    r"""One normal over a group of weights, with all their correlations.

    .. math:: q(\theta) = \mathcal{N}(\theta \mid m, L L^\top)

    Args:
        max_parameters: Refuse larger groups: L is a D by D matrix, and training keeps some six of that size. 3,000
            weights take 220 MB.
    """

    max_parameters: int = 3_000

    def __post_init__(self) -> None:
        check_count("max_parameters", self.max_parameters)

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> FullRankModule:
        """See :meth:`Family.build`."""
        if layout.size > self.max_parameters:
            raise Unsupported(
                f"A full-rank normal over {layout.size:,} weights would need a {layout.size:,} x {layout.size:,} "
                f"matrix; max_parameters is {self.max_parameters:,}. Raise it, make fewer weights random "
                f"(random='last_layer'), give only some of them this family (families={{'head.*': FullRank()}}), or "
                f"use LowRankVI."
            )
        return FullRankModule(layout, loc, initial_scale)


class FullRankModule(FamilyModule):
    """Mean and Cholesky factor.

    Attributes:
        loc: Mean, ``(D,)``.
        log_scale: Logarithms of s, the diagonal of L, ``(D,)``.
        mix: R, ``(D, D)``, of which only what is below the diagonal counts.
    """

    normal_marginals: ClassVar[bool] = True

    def __init__(self, layout: Layout, loc: Tensor, initial_scale: float):
        super().__init__(layout)
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(torch.full_like(self.loc, math.log(initial_scale)))
        self.mix = nn.Parameter(loc.new_zeros(len(loc), len(loc)))

    @property
    def prefers_path(self) -> bool:
        """Up to a few hundred weights: q can then be the posterior itself, where the noise of the gradient vanishes."""
        return len(self.loc) <= _PATH_BELOW

    def draw(self, count: int) -> tuple[Tensor, None]:
        """See :meth:`FamilyModule.draw`."""
        return self._draw(count, self.mix.tril(-1)), None

    def _draw(self, count: int, mix: Tensor) -> Tensor:
        noise = fast_randn(count, len(self.loc), like=self.loc)
        return torch.addcmul(self.loc, self.log_scale.exp(), noise + noise @ mix.T)

    def entropy(self) -> Tensor:
        """From the determinant of L."""
        return self.log_scale.sum() + HALF_LOG_TWO_PI_E * len(self.loc)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and diagonal of the covariance."""
        return self.loc, self._variances(self.mix.tril(-1))

    def _variances(self, mix: Tensor) -> Tensor:
        return (2.0 * self.log_scale).exp() * (1.0 + mix.square().sum(1))

    def draw_with_terms(self, count: int) -> Drawn:
        """With one copy of the lower triangle."""
        mix = self.mix.tril(-1)
        return Drawn(self._draw(count, mix), None, self.entropy(), (self.loc, self._variances(mix)))

    def held_log_density(self, values: Tensor) -> Tensor:
        """See :meth:`FamilyModule.held_log_density`; only what is below the diagonal of R is read."""
        standard = (values - self.loc.detach()) / self.log_scale.detach().exp()
        noise = torch.linalg.solve_triangular(self.mix.detach(), standard.T, upper=False, unitriangular=True)
        return -0.5 * noise.square().sum(0)

    def posterior(self, model: Model, **common: Any) -> FullNormal:
        """A normal with a full covariance."""
        mix = self.mix.detach().tril(-1)
        mix.diagonal().fill_(1.0)
        return FullNormal(model, self.layout, self.loc, self.log_scale.detach().exp().unsqueeze(1) * mix, **common)
