"""What is predicted: numbers in the user's units, or classes with the user's labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from knowable.core.prediction.components import restored, transformed
from knowable.core.prediction.prediction import Prediction, RegressionPrediction
from knowable.errors import DamagedArtifact, InvalidData
from knowable.tabular.columns import as_numbers, find_missing, mostly_numbers, shown
from knowable.tabular.number_columns import middle_and_unit, refuse_slips
from knowable.tabular.table import Table, listed

TASKS = ("regression", "classification")
_WRONG = "is not a number, and the target must be one. Correct it, or remove the row."
_MOST_CLASSES_TO_ASK = 10


def _log(y: np.ndarray) -> np.ndarray:
    if not (y > 0).all():
        raise InvalidData(f"likelihood='log_normal' is for numbers above 0, the target has {shown(y.min())}.")
    return np.log(y)


def _logit(y: np.ndarray) -> np.ndarray:
    if not ((y > 0) & (y < 1)).all():
        raise InvalidData(
            f"likelihood='logit_normal' is for numbers between 0 and 1, the target has values from {shown(y.min())} to "
            f"{shown(y.max())}."
        )
    return np.log(y) - np.log1p(-y)


TRANSFORMS = {"none": lambda y: y, "log": _log, "logit": _logit}


@dataclass(frozen=True)
class NumberTargets:
    r"""Numbers, one or several for each row, centred and scaled for the network: :math:`y' = (T(y) - m) / s`.

    Predictions come back in the user's units, densities included.
    """

    means: tuple[float, ...]  # m of each output
    scales: tuple[float, ...]  # s of each output; 1 for a constant one
    flat: bool = True  # whether targets were one number a row, and not a column of one
    names: tuple[str, ...] = ()  # names of the outputs, where they have any
    transform: str = "none"  # T: "none", "log" or "logit"

    @classmethod
    def learn(cls, y: np.ndarray, names: tuple[str, ...] = (), transform: str = "none") -> NumberTargets:
        """Measure targets ``(rows,)`` or ``(rows, outputs)``."""
        columns = TRANSFORMS[transform](y.reshape(len(y), -1))
        means, scales = columns.mean(0), columns.std(0)
        varies = scales > 1e-12 * np.maximum(1e-300, np.abs(means))
        return cls(
            tuple(map(float, means)),
            tuple(map(float, np.where(varies, scales, 1.0))),
            flat=y.ndim == 1,
            names=names,
            transform=transform,
        )

    @property
    def outputs(self) -> int:
        """How many numbers a row has."""
        return len(self.means)

    def scale(self, y: np.ndarray) -> np.ndarray:
        """Targets for the network, ``(rows, outputs)``."""
        return (TRANSFORMS[self.transform](y.reshape(len(y), -1)) - np.array(self.means)) / np.array(self.scales)

    def restore(self, prediction: Prediction) -> Prediction:
        """A prediction of the network's in the user's units."""
        if not isinstance(prediction, RegressionPrediction) or prediction.components.discrete:
            return prediction
        means, scales = (torch.tensor(each, dtype=torch.float64) for each in (self.means, self.scales))
        if self.transform != "none":
            return transformed(prediction, self.transform, means, scales)
        return restored(prediction, means, scales)

    def restore_values(self, values: torch.Tensor) -> torch.Tensor:
        """Numbers of the network's, such as the ends of an interval, in the user's units."""
        means, scales = (torch.tensor(each, dtype=torch.float64) for each in (self.means, self.scales))
        found = values.double() * scales + means
        return {"log": torch.exp, "logit": torch.sigmoid}.get(self.transform, torch.clone)(found)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"task": "regression", **asdict(self)}


@dataclass(frozen=True)
class ClassTargets:
    """Classes, in the order of their labels."""

    classes: tuple[Any, ...]  # the labels: all texts, all numbers, or False and True
    names: tuple[str, ...] = ()

    @classmethod
    def learn(cls, y: np.ndarray, names: tuple[str, ...] = ()) -> ClassTargets:
        """Find the classes in labels ``(rows,)``."""
        labels = np.unique(y)
        if len(labels) < 2:
            raise InvalidData(
                f"The target has one class only ({listed(labels)}): there is nothing to tell apart. Give rows of two "
                f"classes or more."
            )
        return cls(tuple(labels.tolist()), names)

    @property
    def outputs(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    def codes(self, y: np.ndarray) -> np.ndarray:
        """Labels as whole numbers from 0."""
        place = {label: code for code, label in enumerate(self.classes)}
        unseen = sorted({str(label) for label in np.unique(y).tolist() if label not in place})
        if unseen:
            raise InvalidData(
                f"y has classes that were not there before: {listed(unseen)}. The classes are {listed(self.classes)}."
            )
        return np.array([place[label] for label in y.tolist()], dtype=np.int64)

    def labels(self, codes: np.ndarray) -> np.ndarray:
        """Whole numbers from 0 as labels."""
        return np.array(self.classes)[codes]

    def restore(self, prediction: Prediction) -> Prediction:
        """The prediction as it is: classes have no units."""
        return prediction

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"task": "classification", **asdict(self)}


Targets = NumberTargets | ClassTargets


def targets_from_json(saved: Mapping[str, Any]) -> Targets:
    """Back from plain values."""
    try:
        names = tuple(saved["names"])
        if saved["task"] == "classification":
            return ClassTargets(tuple(saved["classes"]), names)
        transform = saved.get("transform", "none")
        return NumberTargets(tuple(saved["means"]), tuple(saved["scales"]), saved["flat"], names, transform)
    except (KeyError, TypeError) as error:
        raise DamagedArtifact(f"The schema's target cannot be read: {error}. Fit again.") from None


# --- which likelihood fits -------------------------------------------------------------------------------------------

_FEWEST = 30  # rows, from which a likelihood is chosen by them
_GAIN = 0.05  # nats a row, by which a transform must raise the likelihood of a linear model
_LARGEST_MEAN = 50  # of counts: larger ones are as good as continuous
_MANY_ZEROS = 0.5  # share from which zeros have a probability of their own
_ONE_VALUE = 0.5  # share from which a density that adapts its width would be a spike at one value


def recognise(y: np.ndarray, x: np.ndarray) -> str:
    """What targets are: ``"number"``, ``"count"``, ``"zero_inflated"``, ``"log_normal"`` and so on.

    Whole numbers from 0 on with a small mean, most of which occur more than once, are counts. Other numbers more than
    half of which are the same are ``"gaussian"``, with one width for all rows: a density that adapts its width could be
    as high as it likes at that value, and narrow around it. A logarithm or logit (``"logit_normal"``) is taken where it
    raises the log likelihood of a linear model of the inputs with normal noise, in the target's own units (Box and Cox,
    1964).

    Args:
        y: Targets ``(rows,)``.
        x: Inputs ``(rows, features)``.
    """
    if (y.ndim > 1 and y.shape[1] > 1) or len(y) < _FEWEST:
        return "number"
    y = y.reshape(-1)
    values, times = np.unique(y, return_counts=True)
    repeats = 2 < len(values) <= len(y) / 2
    if repeats and y.min() == 0 and (y == y.round()).all() and y.mean() <= _LARGEST_MEAN:
        return "zero_inflated" if (y == 0).mean() > _MANY_ZEROS else "count"
    if len(values) > 1 and times.max() > _ONE_VALUE * len(y):
        return "gaussian"
    if y.min() <= 0 or len(values) == 1:
        return "number"
    plain = _linear_log_likelihood(y, x)
    found = {"log_normal": _linear_log_likelihood(np.log(y), x) - np.log(y).mean()}
    if y.max() < 1:
        found["logit_normal"] = _linear_log_likelihood(_logit(y), x) - (np.log(y) + np.log1p(-y)).mean()
    best = max(found, key=lambda name: found[name])
    return best if found[best] > plain + _GAIN else "number"


def _linear_log_likelihood(y: np.ndarray, x: np.ndarray) -> float:
    """Log density a row at the best noise, of a ridge regression; its penalty keeps it from meeting every row."""
    x, centred = x - x.mean(0), y - y.mean()
    weights = np.linalg.solve(x.T @ x + (1.0 + 0.01 * len(y)) * np.eye(x.shape[1]), x.T @ centred)
    return float(-0.5 * np.log(max(np.mean((centred - x @ weights) ** 2), 1e-300)))


def infer_task(table: Table, names: tuple[str, ...]) -> str:
    """Classification for texts, for yes and no, and for two whole numbers; regression for other numbers.

    A text among many numbers is a slip, and does not make them classes.
    """
    import pandas as pd

    name, *more = names
    if more:
        return "regression"
    values = table.column(name)
    present = values[~find_missing(values)]
    dtype: Any = values.dtype
    if isinstance(dtype, pd.CategoricalDtype) or pd.api.types.is_bool_dtype(dtype):
        return "classification"
    if not pd.api.types.is_numeric_dtype(dtype):
        return "regression" if mostly_numbers(present) else "classification"
    distinct = pd.unique(present)
    return (
        "classification" if len(distinct) == 2 and all(float(each).is_integer() for each in distinct) else "regression"
    )


def asked_of_numbers(name: str, y: np.ndarray) -> list[str]:
    """A question where numbers to predict may be the numbers of classes: few, whole, without a gap, from 0 or 1."""
    found = np.unique(y)
    steps = bool(np.all(np.diff(found) == 1)) and found[0] in (0, 1)
    if not (steps and 3 <= len(found) <= _MOST_CLASSES_TO_ASK and len(y) >= 5 * len(found)):
        return []
    return [
        f"target {name!r} has only the whole numbers {found[0]:g} to {found[-1]:g}: are they classes? They are "
        f"predicted as numbers; if they are classes, pass --task classification"
    ]


def target_values(table: Table, names: tuple[str, ...], task: str) -> np.ndarray:
    """The target of every row: numbers ``(rows,)`` or ``(rows, outputs)``, or labels ``(rows,)``."""
    for name in names:
        _refuse_gaps(table, name)
    if task == "regression":
        found = [as_numbers(table, name, _WRONG) for name in names]
        return found[0] if len(found) == 1 else np.column_stack(found)
    name, *more = names
    if more:
        raise InvalidData(f"Classification has one target, got {listed(names)}. Fit one classifier for each.")
    return label_array(table.column(name).to_numpy())


def label_array(values: np.ndarray) -> np.ndarray:
    """Labels as an array of one plain type: whole numbers, numbers, truth values, or texts."""
    if values.dtype.kind in "biuf":
        return values
    kinds = {type(value) for value in values.tolist()}
    if kinds <= {bool} or kinds <= {int} or kinds <= {int, float}:
        return np.array(values.tolist())
    return np.array([str(value) for value in values.tolist()], dtype=object)


def refuse_hopeless(
    table: Table, names: tuple[str, ...], y: np.ndarray, task: str, kinds: Mapping[str, Any] | None = None
) -> None:
    """Refuse a target from which nothing can be learned, or with an extreme outlier."""
    if len(table) < 2:
        raise InvalidData(f"{table.source} has 1 sample: at least 2 rows are needed.")
    if task == "regression":
        for name, column in zip(names, y.reshape(len(y), -1).T, strict=True):
            if (column == column[0]).all():
                raise InvalidData(
                    f"The target {name!r} is {shown(column[0])} in every row: there is nothing to learn. Is it the "
                    f"right column?"
                )
            if name not in (kinds or {}):
                refuse_slips(table, name, column, *middle_and_unit(column))
        return
    classes = len(set(y.tolist()))
    if classes > 50 and classes > len(y) / 2:
        raise InvalidData(
            f"The target {names[0]!r} has {classes} classes in {len(y)} rows. Is it a number, or an identifier? "
            f"Choose another target, or task='regression'."
        )


def _refuse_gaps(table: Table, name: str) -> None:
    gaps = np.flatnonzero(find_missing(table.column(name)))
    if len(gaps) == len(table):
        raise InvalidData(f"The target {name!r} has no values in {table.source}. Is it the right column?")
    if len(gaps):
        more = f" (and {len(gaps) - 1} other{'s' * (len(gaps) > 2)})" if len(gaps) > 1 else ""
        raise InvalidData(
            f"{table.where(int(gaps[0]), name)}{more}: the target is missing. Remove such rows, or fill them in."
        )
