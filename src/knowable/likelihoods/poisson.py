"""The Poisson likelihood: counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.likelihood import DiagonalInformation, Likelihood
from knowable.core.network.params import Params
from knowable.core.prediction.prediction import (
    Components,
    RegressionPrediction,
    as_numbers,
    refuse_where,
    sum_over_event,
)  # fmt: skip


@dataclass(frozen=True)
class Poisson(Likelihood):
    r"""Counts: the network's output is the logarithm of the rate.

    .. math:: p(y \mid f) = \frac{e^{y f} e^{-e^f}}{y!}
    """

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        y = as_numbers(y, output, output.shape[1:], name=name)
        advice = "For numbers that are not counts use Gaussian() or StudentT()."
        refuse_where((y < 0) | (y != y.round()), y, name=name, expected="a whole number, 0 or more", advice=advice)
        return y

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        return sum_over_event(poisson_log_prob(y, output))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        return RegressionPrediction(PoissonComponents(outputs), log_weights)

    def information(self, output: Tensor, params: Params) -> DiagonalInformation:
        return DiagonalInformation(output.exp())


@dataclass
class PoissonComponents(Components):
    """One Poisson distribution for each posterior draw, row and output."""

    discrete = True

    log_rate: Tensor  # logarithms of the rates, (K, batch, ...)

    @property
    def mean(self) -> Tensor:
        return self.log_rate.exp()

    @property
    def variance(self) -> Tensor:
        return self.log_rate.exp()

    def log_prob(self, y: Tensor) -> Tensor:
        is_count = (y >= 0) & (y == y.floor())
        return poisson_log_prob(y.clamp_min(0.0), self.log_rate).masked_fill(~is_count, -torch.inf)

    def cdf(self, y: Tensor) -> Tensor:
        shape = y.floor().clamp_min(0.0) + 1.0
        rate = self.log_rate.exp()
        return torch.special.gammaincc(shape.expand_as(rate), rate).masked_fill(y < 0, 0.0)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(self.mean.gather(0, index), generator=generator)


def poisson_log_prob(y: Tensor, log_rate: Tensor) -> Tensor:
    """Log probability of counts, elementwise."""
    return y * log_rate - log_rate.exp() - torch.lgamma(y + 1.0)
