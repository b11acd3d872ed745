"""A model with its data, as what methods are compared on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.comparison.contenders import as_method, plain_repr
from knowable.comparison.subject import Fitted, Subject
from knowable.core.data import as_data, as_input
from knowable.core.deadline import time_limit
from knowable.core.diagnostics import Diagnostics
from knowable.core.method import Method
from knowable.core.model import Model
from knowable.core.posterior import Posterior
from knowable.core.prediction import Prediction
from knowable.core.storage import tensor_fingerprint
from knowable.errors import Unsupported


class FittedModel(Fitted):
    """A posterior."""

    def __init__(self, posterior: Posterior):
        self.posterior = posterior

    def predict(self, x: Any, *, samples: int) -> Prediction:
        """By Monte Carlo over so many draws."""
        return self.posterior.predict(x, samples=samples)

    def outcomes(self, y: Any, prediction: Prediction) -> Any:
        """As they are."""
        return y

    @property
    def diagnostics(self) -> Diagnostics:
        """Those of the posterior."""
        return self.posterior.diagnostics


class ModelSubject(Subject):
    """A model and ``(x, y)``."""

    def __init__(self, model: Model, data: Any):
        checked = as_data(data, model)
        if checked.weights is not None:
            raise Unsupported("data has weights on its rows, which a comparison does not heed. Leave them out.")
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

    def fit(self, method: Method | str, index: np.ndarray, *, seed: int, seconds: float | None) -> FittedModel:
        """Fit the method's posterior."""
        data = (self.inputs(index), self.outcomes(index))
        with time_limit(seconds):
            return FittedModel(as_method(method).fit(self.model, data, seed=seed, progress=False))

    def identity(self) -> dict[str, str]:
        """Model, start values and data."""
        known = [*self.model.params().values(), *self.model.frozen_params().values(), *self.model.buffers().values()]
        return {
            "model": f"{plain_repr(self.model)} {plain_repr(self.model.net)}",
            "start": tensor_fingerprint(*known),
            "data": tensor_fingerprint(self.x, self.y, rows=self.rows),
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
