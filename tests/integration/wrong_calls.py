"""Small models, fits and predictions that are called wrongly, and what a wrong call must give."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import knowable as kn

X = torch.randn((20, 2), generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
LABELS = torch.arange(20) % 3


def at(tensor: Tensor, row: int, value: float, column: int = 0) -> Tensor:
    changed = tensor.clone()
    changed[row, column] = value
    return changed


def linear_model(**settings: Any) -> kn.Model:
    return kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1), **settings)


def fit(data: Any = (X, Y), model: Any = None, **settings: Any) -> kn.Posterior:
    return kn.MAP(epochs=1).fit(linear_model() if model is None else model, data, **settings)


def fit_classes(x: Any = X, y: Any = LABELS) -> kn.Posterior:
    return fit((x, y), kn.Model(nn.Linear(2, 3), kn.Categorical()))


@cache
def posterior() -> kn.DiagonalNormal:
    return kn.MeanFieldVI(epochs=1).fit(linear_model(), (X, Y))


@cache
def prediction() -> kn.RegressionPrediction:
    return posterior().predict(X, 4)


@cache
def class_prediction() -> kn.ClassPrediction:
    return fit_classes().predict(X)


def frame(**columns: Any) -> Any:
    import pandas as pd

    return pd.DataFrame(columns)


class Recurrent(nn.Module):
    """Returns a tuple, or puts the batch second."""

    def __init__(self, how: Callable[[Tensor], Any]):
        super().__init__()
        self.linear, self.how = nn.Linear(2, 1), how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.linear(x))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


Case = tuple[Callable[[], Any], type[Exception], str]


def refuses(call: Callable[[], Any], error: type[Exception], wanted: str) -> None:
    """Assert that ``call`` raises one of the library's own exceptions with a message that matches and is not a dump."""
    with pytest.raises(error, match=wanted) as caught:
        call()
    assert isinstance(caught.value, kn.KnowableError)
    assert len(str(caught.value)) < 1000  # the longest names all methods
