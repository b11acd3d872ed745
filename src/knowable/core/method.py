"""What a method is: a frozen dataclass of knobs that turns a model and data into a posterior."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import fields
from typing import Any

from knowable.core.compiling.engine import Engine
from knowable.core.model.data import Data, as_data
from knowable.core.model.model import Model
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.checkpoint import Checkpoint
from knowable.core.storage.folder import tensor_fingerprint
from knowable.core.support.checks import check_count
from knowable.errors import InvalidArgument, InvalidType, Unsupported


class Method(ABC):
    """An inference method. Concrete methods are frozen dataclasses, one file each."""

    @abstractmethod
    def fit(
        self,
        model: Model,
        data: Any,
        *,
        validation: Any = None,
        seed: int = 0,
        progress: bool | None = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
        engine: Engine | None = None,
    ) -> Posterior:
        """Fit the posterior of ``model`` given ``data``.

        Args:
            model: The model.
            data: ``(x, y)`` tensors or arrays, a Dataset or a DataLoader.
            validation: Held-out data of the same kind, for early stopping.
            seed: Fixes every random choice of the fit.
            progress: Show a progress bar; None shows it only on a terminal.
            checkpoint: A folder to save to now and then; a fit that finds its own state there goes on from it.
            engine: Precision of the arithmetic.
        """

    def __repr__(self) -> str:
        """The settings that differ from the defaults."""
        changed = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)  # type: ignore[arg-type]
            if each.repr and getattr(self, each.name) != each.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


def admit(
    model: Any,
    data: Any,
    validation: Any,
    seed: int,
    *,
    batch_size: int | None = None,
    weighted: bool = False,
    binary: bool = False,
) -> tuple[Data, Data | None, int]:
    """Check what every fit is given, once at the door: the data, the held-out data, and the seed.

    ``weighted`` says that the method heeds weights on rows, ``binary`` that it can do parameters which are 0 or 1;
    without it they are refused.
    """
    if not isinstance(model, Model):
        raise InvalidType(f"model must be a knowable Model (network, likelihood, prior), got {type(model).__name__}.")
    if model.binary_names and not binary:
        raise Unsupported(
            f"model has parameters that are 0 or 1 ({', '.join(model.binary_names[:5])}), which this method cannot do. "
            f"DiscreteVI can; or freeze them."
        )
    seed = check_count("seed", seed, at_least=0)
    training = as_data(data, model, batch_size=batch_size)
    if training.weights is not None and not weighted:
        raise Unsupported("data has weights on its rows, which this method does not heed. Trained networks do: MAP.")
    if training.weights is not None and training.weights.dim() != 1:
        raise InvalidArgument(f"weights must be one number for each row, got shape {tuple(training.weights.shape)}.")
    held_out = None if validation is None else as_data(validation, model, name="validation")
    if held_out is not None and held_out.weights is not None:
        raise Unsupported("validation has weights on its rows: held-out rows all count the same. Leave weights out.")
    return training, held_out, seed


def identity_of(method: Method, model: Model, data: Data, validation: Data | None = None) -> dict[str, Any]:
    """What makes a fit this fit, for its checkpoint: a resumed fit must agree in all of it."""
    known = [*model.params().values(), *model.frozen_params().values(), *model.buffers().values()]
    return {
        "method": repr(method),
        "model": repr(model),
        "start": tensor_fingerprint(*known),
        "prior": str(model.log_prior(model.params()).item()),
        "data": _rows_identity(data),
        "validation": None if validation is None else _rows_identity(validation),
    }


def _rows_identity(data: Data) -> str:
    return tensor_fingerprint(*data.tensors) if data.in_memory else str(data.size)
