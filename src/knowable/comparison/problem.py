"""What methods are compared on: a model with its data, or an estimator with its table.

A :class:`Problem` holds all rows and fits a method to some of them; a :class:`Fitted` predicts.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from knowable.comparison.methods import as_method, plain_repr
from knowable.core.method import Method
from knowable.core.model.data import as_data, as_input
from knowable.core.model.model import Model
from knowable.core.network.inputs import tensors_of
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.prediction.prediction import ClassPrediction, Prediction
from knowable.core.storage.folder import tensor_fingerprint
from knowable.core.support.time_limit import time_limit
from knowable.errors import InvalidData, InvalidType, Unsupported
from knowable.registry import find_method


@dataclass(frozen=True)
class Fitted:
    """A method fitted to some of the rows."""

    predict: Callable[..., Prediction]  # of inputs and ``samples=``
    outcomes: Callable[[Any, Prediction], Any]  # observed outcomes as the prediction scores them
    diagnostics: Diagnostics


class Problem(ABC):
    """All rows, and how a method is fitted to some of them.

    Attributes:
        rows: How many.
    """

    rows: int

    @abstractmethod
    def resolve(self, method: Any) -> Method | str:
        """What the user called a method, as :meth:`fit` wants it."""

    @abstractmethod
    def inputs(self, index: np.ndarray) -> Any:
        """Inputs of some rows."""

    @abstractmethod
    def outcomes(self, index: np.ndarray) -> Any:
        """Outcomes of some rows."""

    @abstractmethod
    def outside(self, x: Any) -> Any:
        """Inputs from elsewhere, checked as far as they can be before a fit."""

    @abstractmethod
    def fit(self, method: Method | str, index: np.ndarray, *, seed: int, seconds: float | None) -> Fitted:
        """Fit to some rows, within ``seconds`` where the fit can be told."""

    @abstractmethod
    def identity(self) -> dict[str, str]:
        """What makes a comparison on it this one, for its file."""

    @abstractmethod
    def parameters(self) -> int | None:
        """How many parameters are random, where that is known before a fit."""

    @abstractmethod
    def describe(self) -> str:
        """What is compared on, for people."""


# --- A model with its data, as what methods are compared on ----------------------------------------------------------


class ModelProblem(Problem):
    """A model and ``(x, y)``."""

    def __init__(self, model: Model, data: Any):
        checked = as_data(data, model)
        if checked.weights is not None:
            raise Unsupported("data has row weights, which a comparison does not support. Leave them out.")
        x, y = checked.tensors
        self.model, self.x, self.y, self.rows = model, x, y, len(x)

    def resolve(self, method: Any) -> Method:
        """A method from its name."""
        return as_method(method)

    def inputs(self, index: np.ndarray) -> Tensor:
        """Rows of x."""
        return self.x[self._places(index)]

    def outcomes(self, index: np.ndarray) -> Tensor:
        """Rows of y."""
        return self.y[self._places(index)]

    def outside(self, x: Any) -> Tensor:
        """Inputs that the network takes."""
        return as_input(x, self.model, name="outside")

    def fit(self, method: Method | str, index: np.ndarray, *, seed: int, seconds: float | None) -> Fitted:
        """Fit the method's posterior."""
        data = (self.inputs(index), self.outcomes(index))
        with time_limit(seconds):
            posterior = as_method(method).fit(self.model, data, seed=seed, progress=False)
        return Fitted(posterior.predict, _as_they_are, posterior.diagnostics)

    def identity(self) -> dict[str, str]:
        """Model, start values and data."""
        known = [*self.model.params().values(), *self.model.frozen_params().values(), *self.model.buffers().values()]
        return {
            "model": f"{plain_repr(self.model)} {plain_repr(self.model.net)}",
            "start": tensor_fingerprint(*known),
            "data": tensor_fingerprint(*tensors_of(self.x, self.y), rows=self.rows),
        }

    def parameters(self) -> int:
        """Numbers that are random."""
        start = self.model.params()
        return sum(start[name].numel() for name in self.model.random_names)

    def describe(self) -> str:
        """The model in a line."""
        return plain_repr(self.model)

    def _places(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)).to(self.x.device)


# --- An estimator with its table, as what methods are compared on: any that follows the conventions of scikit-learn --

AUTO = "auto"
"""The name by which an estimator chooses a method itself."""

_BEFORE = {"budget": "normal", "class_weight": None}  # what comparisons did before there were these parameters
_SET = ("method", "random_state", "time_limit", "engine")  # parameters that the comparison sets, or that change nothing


@runtime_checkable
class DistributionEstimator(Protocol):
    """An estimator after the conventions of scikit-learn whose predictions are distributions.

    It has a parameter ``method``, and may have ``random_state`` and ``time_limit`` (seconds), which are set too.
    """

    def fit(self, X: Any, y: Any) -> Any:
        """Learn from a table and its outcomes."""
        ...

    def predict_dist(self, X: Any) -> Prediction:
        """The predictive distribution."""
        ...

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name."""
        ...

    def set_params(self, **params: Any) -> Any:
        """Set parameters."""
        ...


class EstimatorProblem(Problem):
    """An estimator and ``(X, y)``: arrays or data frames."""

    def __init__(self, estimator: DistributionEstimator, data: Any):
        from sklearn.utils import check_consistent_length

        if not isinstance(data, tuple | list) or len(data) != 2:
            raise InvalidType(f"data must be a pair (X, y), got {type(data).__name__}.")
        self.estimator = estimator
        self.x, self.y = (each.numpy(force=True) if isinstance(each, Tensor) else each for each in data)
        try:
            check_consistent_length(self.x, self.y)
        except (ValueError, TypeError) as error:
            raise InvalidData(f"data must be X and y with a row each for every example: {error}") from None
        self.rows = len(np.asarray(self.y))
        if "method" not in self._own():
            raise InvalidType(f"{type(estimator).__name__} has no parameter 'method', by which methods are compared.")

    def resolve(self, method: Any) -> Method | str:
        """A name that the estimator knows, or a method."""
        if isinstance(method, str):
            return AUTO if method == AUTO else find_method(method).name
        return as_method(method)

    def inputs(self, index: np.ndarray) -> Any:
        """Rows of X."""
        return _some(self.x, index)

    def outcomes(self, index: np.ndarray) -> Any:
        """Rows of y."""
        return _some(self.y, index)

    def outside(self, x: Any) -> Any:
        """As it is: the estimator checks it."""
        return x

    def fit(self, method: Method | str, index: np.ndarray, *, seed: int, seconds: float | None) -> Fitted:
        """Fit a clone with that method."""
        from sklearn.base import clone

        estimator: Any = clone(self.estimator)
        settings = {"method": method, "random_state": seed} | ({} if seconds is None else {"time_limit": seconds})
        estimator.set_params(**{name: value for name, value in settings.items() if name in self._own()})
        with time_limit(seconds):
            estimator.fit(self.inputs(index), self.outcomes(index))
        posterior = getattr(estimator, "posterior_", None)  # where it keeps one
        return Fitted(
            partial(_predicted_by, estimator),
            partial(_as_scored, estimator),
            Diagnostics() if posterior is None else posterior.diagnostics,
        )

    def identity(self) -> dict[str, str]:
        """The estimator's parameters but for those that the comparison sets, and the table."""
        kept = {name: value for name, value in self._own().items() if name not in _SET}
        for name, before in _BEFORE.items():
            if name in kept and kept[name] == before:
                del kept[name]
        settings = ", ".join(f"{name}={plain_repr(value)}" for name, value in sorted(kept.items()))
        return {
            "estimator": f"{type(self.estimator).__name__}({settings})",
            "data": f"{table_fingerprint(self.x)} {table_fingerprint(self.y)}",
        }

    def parameters(self) -> None:
        """Not known before a fit: the estimator may choose the network."""
        return

    def describe(self) -> str:
        """The estimator's name."""
        return type(self.estimator).__name__

    def _own(self) -> dict[str, Any]:
        return self.estimator.get_params(deep=False)


def _as_they_are(y: Any, prediction: Prediction) -> Any:
    return y


def _predicted_by(estimator: Any, x: Any, *, samples: int) -> Prediction:
    """The prediction, with as many draws as the estimator is set to."""
    return estimator.predict_dist(x)


def _as_scored(estimator: Any, y: Any, prediction: Prediction) -> np.ndarray:
    """Numbers as they are; labels as their places among the classes."""
    values = np.asarray(y)
    if not isinstance(prediction, ClassPrediction):
        return values.astype(float)
    if not hasattr(estimator, "classes_"):
        raise InvalidType(f"{type(estimator).__name__} predicts labels but has no classes_ after fit.")
    places = {label: place for place, label in enumerate(np.asarray(estimator.classes_).tolist())}
    unknown = [label for label in values.tolist() if label not in places]
    if unknown:
        raise InvalidData(
            f"the label {unknown[0]!r} is in the rows held out and not in the training rows of this fold. Use "
            f"fewer folds, or leave rare labels out."
        )
    return np.array([places[label] for label in values.tolist()])


def table_fingerprint(table: Any) -> str:
    """A hash of an array's or a data frame's values and column names."""
    values = table.numpy(force=True) if isinstance(table, Tensor) else np.asarray(table)
    digest = hashlib.sha256(f"{values.shape}".encode())
    named: Any = table
    if type(table).__module__.partition(".")[0] in ("pandas", "polars") and values.ndim == 2:
        digest.update(repr(list(map(str, named.columns))).encode())
    if values.dtype.kind in "biuf":
        digest.update(np.ascontiguousarray(values, dtype=np.float64).tobytes())
    else:
        digest.update(repr(values.tolist()).encode())
    return digest.hexdigest()


def _some(table: Any, index: np.ndarray) -> Any:
    from sklearn.utils import _safe_indexing

    return _safe_indexing(table, index)
