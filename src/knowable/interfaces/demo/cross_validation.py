"""Predictions for every row by a fit that has not seen it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Components, RegressionPrediction
from knowable.errors import InvalidArgument


class JoinedComponents:
    """Components of several predictions with the same number of draws, one after another along the rows."""

    def __init__(self, parts: Sequence[Components]):
        self.parts = list(parts)
        self.sizes = [part.mean.shape[1] for part in self.parts]
        self.discrete = self.parts[0].discrete

    @property
    def mean(self) -> Tensor:
        """Expected outcome of each component, ``(K, batch, ...)``."""
        return torch.cat([part.mean for part in self.parts], dim=1)

    @property
    def variance(self) -> Tensor:
        """Variance of each component, ``(K, batch, ...)``."""
        return torch.cat([part.variance for part in self.parts], dim=1)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(batch, ...)`` under each component."""
        return torch.cat([part.log_prob(each) for part, each in self._paired(y, 0)], dim=1)

    def cdf(self, y: Tensor) -> Tensor:
        """Distribution function at ``y`` ``(batch, ...)`` under each component."""
        return torch.cat([part.cdf(each) for part, each in self._paired(y, 0)], dim=1)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, batch, ...)``."""
        return torch.cat([part.sample(each, generator=generator) for part, each in self._paired(index, 1)], dim=1)

    def _paired(self, values: Tensor, dim: int) -> list[tuple[Components, Tensor]]:
        return list(zip(self.parts, values.split(self.sizes, dim), strict=True))


def join(predictions: Sequence[RegressionPrediction]) -> RegressionPrediction:
    """One prediction for the rows of all, in order.

    Row by row it is what it was; draws of different parts have nothing to do with each other.
    """
    first = predictions[0]
    if any(not torch.equal(first.log_weights, other.log_weights) for other in predictions):
        raise InvalidArgument("predictions must have the same number of draws with the same weights to be joined.")
    within = [each.within for each in predictions]
    known = [each for each in within if each is not None]
    if 0 < len(known) < len(within):
        raise InvalidArgument("predictions must all have, or all lack, variance integrated in closed form.")
    return RegressionPrediction(
        JoinedComponents([each.components for each in predictions]),
        first.log_weights,
        within=torch.cat(known, dim=1) if known else None,
        samples=torch.cat([each.samples for each in predictions], dim=1),
    )
