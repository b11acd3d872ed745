"""Predictions of every kind to be scored, small and in double precision."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction
from knowable.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Poisson, StudentT

DTYPE = torch.float64


def log_weights(draws: int, generator: torch.Generator | None = None) -> Tensor:
    return torch.log_softmax(torch.randn(draws, dtype=DTYPE, generator=generator), 0)


def normals(loc: Tensor, scale: Tensor, weights: Tensor | None = None) -> RegressionPrediction:
    """A mixture of normals with means and scales ``(K, B)``; outputs are columns ``(B, 1)``."""
    outputs = torch.stack((loc, scale.log()), -1).to(DTYPE)
    return HeteroscedasticGaussian().predict(outputs, {}, _log(weights, len(loc)))


def student(df: float, loc: Tensor, scale: float, weights: Tensor | None = None) -> RegressionPrediction:
    return StudentT(df, scale).predict(loc.to(DTYPE), {}, _log(weights, len(loc)))


def counts(rate: Tensor, weights: Tensor | None = None) -> RegressionPrediction:
    return Poisson().predict(rate.to(DTYPE).log(), {}, _log(weights, len(rate)))


def classes(probs: Tensor, weights: Tensor | None = None) -> ClassPrediction:
    """From the draws' probabilities ``(K, B, C, ...)``."""
    return Categorical().predict(probs.to(DTYPE).log(), {}, _log(weights, len(probs)))


def binary(probs: Tensor, weights: Tensor | None = None) -> ClassPrediction:
    """From the draws' P(y=1) ``(K, B, ...)``."""
    return Bernoulli().predict(probs.to(DTYPE).logit(), {}, _log(weights, len(probs)))


def _log(weights: Tensor | None, draws: int) -> Tensor:
    given = torch.ones(draws) if weights is None else weights
    return (given.to(DTYPE) / given.sum()).log()
