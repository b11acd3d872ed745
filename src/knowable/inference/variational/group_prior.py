r"""The prior's side of KL(q ‖ p) for a group of weights: :math:`-E_q[\log p(\theta)]`, by the cheapest way there is.

- Normal and flat priors with fixed values need only means and variances of q, over stretches of the flat vector.
- Priors with a closed form for normals, or normals whose scale is being learned, need them parameter by parameter.
- Everything else takes the draws that the likelihood was given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.normal_divergence import HALF_LOG_TWO_PI_E, NormalStretch, fixed_normal, stretches_of
from knowable.core.params import Layout
from knowable.core.prior import Prior
from knowable.core.types import Params
from knowable.inference.variational.family import Drawn


@dataclass(frozen=True)
class GroupPrior:
    """The priors of the weights of one group.

    Attributes:
        model: The model.
        layout: The weights.
        stretches: All of them, cut where the prior changes.
        others: Those whose prior is not a fixed normal.
    """

    model: Model
    layout: Layout
    stretches: tuple[NormalStretch, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, model: Model, layout: Layout) -> GroupPrior:
        """The priors of the weights of ``layout``."""
        others = tuple(name for name in layout.names if fixed_normal(model.prior.prior_of(name)) is None)
        return cls(model, layout, tuple(stretches_of(layout, model)), others)

    def cross_entropy(self, drawn: Drawn, points: Params, *, normal: bool) -> Tensor:
        """-E_q[log p], in closed form as far as there is one.

        Args:
            drawn: Draws of q and what is known of it.
            points: Point estimates, among them the prior's hyperparameters.
            normal: Whether each weight by itself is normal under q.
        """
        if drawn.moments is None:
            return self.sampled(drawn.values, points)
        means, variances = drawn.moments
        sizes = [stretch.stop - stretch.start for stretch in self.stretches]
        pieces = zip(self.stretches, means.split(sizes), variances.split(sizes), strict=True)
        total = _sum([stretch.cross_entropy(m, v) for stretch, m, v in pieces if stretch.entropy], like=means)
        if not self.others:
            return total
        by_name = self.layout.views(means), self.layout.views(variances), self.layout.views(drawn.values)
        for name in self.others:
            mean, variance, values = (each[name] for each in by_name)
            prior = self._bound(name, points)
            closed = _closed_form(prior, mean, variance, normal=normal)
            total = total + (_sampled(prior, values) if closed is None else closed)
        return total

    def sampled(self, values: Tensor, points: Params) -> Tensor:
        """The mean of -log p over draws ``(K, D)``."""
        pieces = values.split([stretch.stop - stretch.start for stretch in self.stretches], dim=1)
        fixed = [
            stretch.sampled_cross_entropy(piece)
            for stretch, piece in zip(self.stretches, pieces, strict=True)
            if stretch.entropy
        ]
        total = _sum(fixed, like=values)
        views = self.layout.views(values) if self.others else {}
        return total + sum(_sampled(self._bound(name, points), views[name]) for name in self.others)

    def _bound(self, name: str, points: Params) -> Prior:
        prior = self.model.prior.bound(name, points)
        assert prior is not None  # a prior over all parameters as a whole is asked as a whole
        return prior


def _closed_form(prior: Prior, mean: Tensor, variance: Tensor, *, normal: bool) -> Tensor | None:
    """-E[log p] of independent elements with these moments, or None."""
    if normal:
        scale = variance.sqrt()
        kl = prior.kl_from_normal(mean, scale)
        return None if kl is None else kl + scale.log().sum() + HALF_LOG_TWO_PI_E * scale.numel()
    moments = prior.normal_moments()
    if moments is None:
        return None
    spread = moments[1] * variance
    return 0.5 * spread.sum() - prior.log_prob(mean).sum()


def _sampled(prior: Prior, values: Tensor) -> Tensor:
    return -prior.log_prob(values).sum() / len(values)


def _sum(terms: list[Tensor], *, like: Tensor) -> Tensor:
    return torch.stack(terms).sum() if terms else like.new_zeros(())
