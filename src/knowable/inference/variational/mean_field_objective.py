"""The evidence lower bound of a mean-field Gaussian, with the gradient estimator of one's choice."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from knowable.core.model import Model
from knowable.core.normal_objective import FlatNormalObjective
from knowable.core.types import Params
from knowable.inference.variational.score_function import score_surrogate

ESTIMATORS = ("auto", "local", "weight", "flipout", "score", "local_score")
BY_SCORE = ("score", "local_score")
"""Estimators that need no gradient of the likelihood."""


class MeanFieldObjective(FlatNormalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)`, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, \big(\mathrm{KL}(q \,\|\, p) - (T - 1)\, H[q]\big)

    with β and the temperature T both 1 for Bayes.
    """

    recordable = True

    def __init__(self, model: Model, x: Tensor, size: int, *, estimator: str = "auto", **common: Any):
        super().__init__(model, x, size, estimator=estimator, **common)

    def estimate(self, x: Tensor, y: Tensor, points: Params) -> tuple[Tensor, Tensor]:
        """Expected log likelihood per example, and KL over the stretches."""
        if self.estimator in BY_SCORE:
            return score_surrogate(self, x, y, points)
        return self.reparameterised(x, y, points)
