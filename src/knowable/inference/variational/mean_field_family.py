"""The mean-field family: an independent normal for every weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.normal_divergence import entropy_of_normals
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.params import Layout
from knowable.core.randomness import fast_randn
from knowable.inference.variational.family import Family, FamilyModule


@dataclass(frozen=True)
class MeanField(Family):
    r"""Independent normals.

    .. math:: q(\theta) = \prod_d \mathcal{N}(\theta_d \mid m_d, s_d^2)

    Beside other families, weights are drawn. By itself, :class:`~knowable.inference.variational.mean_field.MeanFieldVI`
    has quieter gradients.
    """

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> MeanFieldModule:
        """See :meth:`Family.build`."""
        return MeanFieldModule(layout, loc, initial_scale)


class MeanFieldModule(FamilyModule):
    """Means and logarithms of scales.

    Attributes:
        loc: Means, ``(D,)``.
        log_scale: Logarithms of the standard deviations, ``(D,)``.
    """

    normal_marginals: ClassVar[bool] = True

    def __init__(self, layout: Layout, loc: Tensor, initial_scale: float):
        super().__init__(layout)
        self.loc = nn.Parameter(loc.detach().clone())
        self.log_scale = nn.Parameter(torch.full_like(self.loc, math.log(initial_scale)))

    def draw(self, count: int) -> tuple[Tensor, None]:
        """See :meth:`FamilyModule.draw`."""
        noise = fast_randn(count, len(self.loc), like=self.loc)
        return torch.addcmul(self.loc, self.log_scale.exp(), noise), None

    def entropy(self) -> Tensor:
        """Sum of those of the weights."""
        return entropy_of_normals(self.log_scale)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and variances."""
        return self.loc, (2.0 * self.log_scale).exp()

    def held_log_density(self, values: Tensor) -> Tensor:
        """See :meth:`FamilyModule.held_log_density`."""
        return -0.5 * ((values - self.loc.detach()) / self.log_scale.detach().exp()).square().sum(-1)

    def posterior(self, model: Model, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        views = self.layout.views
        return DiagonalNormal(model, views(self.loc.detach()), views(self.log_scale.detach().exp()), **common)
