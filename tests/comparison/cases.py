"""Small problems, estimators and made-up results that the tests of comparisons share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import nn

import knowable as kn
from knowable.comparison.comparison import Comparison
from knowable.comparison.journal import Record
from knowable.likelihoods import Categorical, HeteroscedasticGaussian

HOSTILE = "<script>alert('$x^2$ & \"quotes\"')</script>"


def linear_problem(rows: int = 40) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    """A linear model with an exact posterior, and data from it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    y = x @ torch.tensor([1.0, -0.5]) + 0.3 * torch.randn(rows, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(2, 1)
    return kn.Model(net, kn.Gaussian(noise=0.3)), (x, y)


def class_problem(rows: int = 60) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    """Three classes, two of them rare."""
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor(([0] * 4 + [1, 2]) * (rows // 6))
    x = torch.nn.functional.one_hot(y, 3).float() + 0.3 * torch.randn(len(y), 3, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Linear(3, 3)
    return kn.Model(net, kn.Categorical()), (x, y)


class MeanEstimator(BaseEstimator):
    """Predicts the training mean with a spread that the method's name says: an estimator without any network."""

    def __init__(
        self, method: Any = "map", random_state: int | None = None, time_limit: float | None = None, shift: float = 0.0
    ):
        self.method = method
        self.random_state = random_state
        self.time_limit = time_limit
        self.shift = shift

    def fit(self, X: Any, y: Any) -> MeanEstimator:
        values = np.asarray(y, dtype=float)
        self.mean_, self.std_ = values.mean() + self.shift, values.std()
        return self

    def predict_dist(self, X: Any) -> kn.Prediction:
        rows = len(np.asarray(X))
        scale = {"map": 0.5, "mean_field_vi": 1.0, "deep_ensemble": 2.0}[self.method] * self.std_
        outputs = torch.tensor([self.mean_, math.log(scale)]).expand(1, rows, 2)
        return HeteroscedasticGaussian().predict(outputs, {}, torch.zeros(1))


class ShareEstimator(BaseEstimator):
    """Predicts the shares of the classes among the training rows."""

    def __init__(self, method: Any = "map"):
        self.method = method

    def fit(self, X: Any, y: Any) -> ShareEstimator:
        self.classes_, counts = np.unique(np.asarray(y), return_counts=True)
        self.shares_ = counts / counts.sum()
        return self

    def predict_dist(self, X: Any) -> kn.Prediction:
        outputs = torch.from_numpy(np.log(self.shares_)).float().expand(1, len(np.asarray(X)), -1)
        return Categorical().predict(outputs, {}, torch.zeros(1))


def record(method: str, fold: int, **scores: float) -> Record:
    return Record(method, repr(method), fold, scores=scores)


def made_up(
    values: dict[str, list[float]], *, higher: dict[str, list[float]] | None = None, **fields: Any
) -> Comparison:
    """A comparison from values of ``nll`` by method and fold; NaN stands for a fold that is not there."""
    records = [
        record(method, fold, nll=value, **({} if higher is None else {"accuracy": higher[method][fold]}))
        for method, folds in values.items()
        for fold, value in enumerate(folds)
        if not math.isnan(value)
    ]
    number = max(map(len, values.values()))
    known = {"records": tuple(records), "not_run": (), "methods": tuple(values), "folds": number}
    return Comparison(**{**known, **fields})


THREE = {"a": [1.0, 2.0, 3.0], "b": [1.1, 2.2, 3.0], "c": [4.0, 5.0, 6.0]}
"""``b`` is tied with ``a``: differences 0.1, 0.2, 0.0 with mean 0.1 and standard error 0.1 / √3; ``c`` is worse."""
