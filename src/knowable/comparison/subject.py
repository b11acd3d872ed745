"""What is compared on, seen through two interfaces.

A :class:`Subject` holds all rows and fits a method to some of them; a :class:`Fitted` predicts. There are two kinds: a
model with its data, and an estimator with its table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from knowable.core.diagnostics import Diagnostics
from knowable.core.method import Method
from knowable.core.prediction import Prediction


class Fitted(ABC):
    """A method fitted to some of the rows."""

    @abstractmethod
    def predict(self, x: Any, *, samples: int) -> Prediction:
        """The predictive distribution at ``x``."""

    @abstractmethod
    def outcomes(self, y: Any, prediction: Prediction) -> Any:
        """Observed outcomes as the prediction scores them."""

    @property
    @abstractmethod
    def diagnostics(self) -> Diagnostics:
        """What the fit says about itself."""


class Subject(ABC):
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
