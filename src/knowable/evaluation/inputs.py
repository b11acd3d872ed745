"""Inputs of the scores: predictions, tensors, arrays and lists, converted to one form and checked once.

Scores are computed in double precision. The dimensions after the rows (outputs, pixels) are flattened into one, so that
every score is first a value for each row and then a mean over rows.

Outcomes that do not count (a label to be ignored, a missing number, see :meth:`Prediction.counted`) are left out of a
row's mean, and a row without any that counts is left out of the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.prediction.prediction import (
    ClassPrediction,
    Prediction,
    RegressionPrediction,
    align_target,
    check_finite_target,
)
from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidData, InvalidType

Array = Tensor | np.ndarray | Sequence[Any]
"""Numbers as a tensor, an array or nested lists."""

_SUM_TOLERANCE = 1e-3  # of the sum of class probabilities, which may have been computed in half precision


def score_tensor(name: str, value: Any, *, device: torch.device | None = None) -> Tensor:
    """Numbers in double precision, integers and booleans as int64; raises for anything else."""
    tensor = to_tensor(value, name)
    if tensor.is_complex():
        raise InvalidType(f"{name} must hold real numbers, got {tensor.dtype}.")
    device = tensor.device if device is None else device
    device = torch.device("cpu") if device.type == "mps" else device  # which has no double precision
    return tensor.to(device=device, dtype=torch.float64 if tensor.is_floating_point() else torch.int64)


def in_double(value: Tensor) -> Tensor:
    """A prediction's tensor in double precision, detached."""
    return score_tensor("prediction", value).double()


def cdf(prediction: RegressionPrediction, x: Tensor) -> Tensor:
    """The CDF at ``x`` in double precision, evaluated in the precision of the prediction."""
    return in_double(prediction.cdf(x.to(prediction.components.mean.dtype)))


def target(
    value: Any, rows: int, *, device: torch.device | None = None, name: str = "y", missing: bool = False
) -> Tensor:
    """Observed outcomes as a tensor with ``rows`` rows and no missing values, unless they may be ``missing``."""
    y = check_rows(name, score_tensor(name, value, device=device))
    if y.shape[0] != rows:
        raise InvalidData(
            f"{name} must have {rows} rows, one for each prediction; got shape {tuple(y.shape)}. "
            f"Predict at the inputs that belong to {name}."
        )
    return check_finite_target(y, name=name, missing=missing)


def check_rows(name: str, value: Tensor) -> Tensor:
    """Return ``value`` if it has at least one row, or raise."""
    if value.dim() == 0:
        raise InvalidData(
            f"{name} must have one row for each point, got the single number {value.item():g}. Pass a vector."
        )
    if value.numel() == 0:
        raise InvalidData(f"{name} is empty (shape {tuple(value.shape)}). A score needs at least one row.")
    return value


def by_row(value: Tensor) -> Tensor:
    """Flatten all dimensions after the rows: ``(B, ...)`` to ``(B, E)``."""
    return value.reshape(value.shape[0], -1)


def row_means(values: Tensor, counted: Tensor | None) -> Tensor:
    """Means over ``(B, E)`` of what counts in each row; rows without any are left out."""
    if counted is None:
        return values.mean(1)
    counts = counted.sum(1)
    return (values.where(counted, 0.0).sum(1) / counts)[counts > 0]


def rows_that_count(prediction: Prediction, y: Array) -> Tensor | None:
    """Which rows have an outcome that counts, ``(B,)``; None where all outcomes count."""
    counted = prediction.counted(score_tensor("y", y, device=prediction.samples.device))
    return None if counted is None else by_row(counted).any(1)


def _refuse_none(counted: Tensor | None) -> Tensor | None:
    if counted is not None and not counted.any():
        raise InvalidData("No outcome in y counts: all are missing or ignored. A score needs at least one.")
    return counted


def regression(prediction: Any, what: str) -> RegressionPrediction:
    """Return ``prediction`` if it is over numbers, or raise saying that ``what`` needs that."""
    if isinstance(prediction, RegressionPrediction):
        if len(prediction) == 0:
            raise InvalidData("prediction is empty. A score needs at least one row.")
        return prediction
    raise InvalidType(
        f"prediction must be a Prediction over numbers for {what}, got a {type(prediction).__name__}."
        + (" For classes use accuracy, brier, nll or ece." if isinstance(prediction, ClassPrediction) else "")
    )


def means_and_target(prediction: Prediction | Array, y: Array) -> tuple[Tensor, Tensor, Tensor | None]:
    """Predicted means, observed numbers, and which of these count (None: all), each ``(B, E)``.

    In the place of those that do not count are the means.
    """
    given = regression(prediction, "this score").mean if isinstance(prediction, Prediction) else prediction
    mean = check_rows("prediction", score_tensor("prediction", given)).double()
    check_finite_target(mean, name="prediction")
    missing = isinstance(prediction, RegressionPrediction) and prediction.missing
    observed = align_target(target(y, mean.shape[0], device=mean.device, missing=missing), mean.shape[1:])
    mean, observed = by_row(mean), by_row(observed).double()
    counted = _refuse_none(prediction.counted(observed) if isinstance(prediction, Prediction) else None)
    return mean, observed if counted is None else observed.where(counted, mean), counted


@dataclass(frozen=True)
class ClassTable:
    """Class probabilities in one form: a binary P(y=1) is written as two classes.

    Attributes:
        probs: ``(B, E, C)``, E outputs or pixels in each of B rows.
        labels: The most probable class, ``(B, E)``.
        shape: The shape labels had before flattening, ``(B, ...)``.
    """

    probs: Tensor
    labels: Tensor
    shape: torch.Size


def class_table(prediction: Prediction | Array, *, name: str = "prediction", y: Tensor | None = None) -> ClassTable:
    """Bring class probabilities to one form.

    Probabilities with as many dimensions as labels are P(y=1); otherwise dimension 1 runs over classes. A plain tensor
    is read as P(y=1) if it is a vector, has one column, or has the shape of ``y``.
    """
    if isinstance(prediction, ClassPrediction):
        probs, labels = score_tensor(name, prediction.probs), score_tensor(name, prediction.labels)
        return _table(name, probs, labels, binary=probs.shape == labels.shape)
    if isinstance(prediction, Prediction):
        raise InvalidType(
            f"{name} must be a Prediction over classes or a tensor of class probabilities, got a "
            f"{type(prediction).__name__}. For numbers use rmse, crps, nll or coverage."
        )
    probs = check_rows(name, score_tensor(name, prediction)).double()
    binary = probs.dim() == 1 or probs.shape[1] == 1
    if not binary and y is not None and y.shape == probs.shape:
        if _sums_to_one(probs):
            raise InvalidData(
                f"y has the shape {tuple(y.shape)} of the class probabilities, as if it were one-hot. "
                f"Pass the labels themselves: y.argmax(1)."
            )
        binary = True
    if not binary and not _sums_to_one(probs):
        raise InvalidData(
            f"{name} must hold class probabilities that sum to one over dimension 1, got shape {tuple(probs.shape)} "
            f"with sums from {probs.sum(1).min():.4g} to {probs.sum(1).max():.4g}. Apply softmax to logits."
        )
    labels = (probs > 0.5).long() if binary else probs.argmax(1)
    return _table(name, probs, labels, binary=binary)


def _table(name: str, probs: Tensor, labels: Tensor, *, binary: bool) -> ClassTable:
    check_rows(name, probs)
    check_finite_target(probs, name=name)
    if probs.min() < -1e-6 or probs.max() > 1 + 1e-6:
        raise InvalidData(
            f"{name} must hold probabilities between 0 and 1, got values from {probs.min():.4g} to {probs.max():.4g}. "
            f"Apply softmax or sigmoid to logits."
        )
    probs = probs.clamp(0.0, 1.0)
    columns = torch.stack((1 - probs, probs), -1) if binary else probs.movedim(1, -1)  # (B, ..., C)
    flat = columns.reshape(columns.shape[0], -1, columns.shape[-1])
    return ClassTable(flat, by_row(labels), labels.shape)


def _sums_to_one(probs: Tensor) -> bool:
    return bool(((probs.sum(1) - 1).abs() <= _SUM_TOLERANCE).all())


def classes_and_target(prediction: Prediction | Array, y: Array) -> tuple[ClassTable, Tensor, Tensor | None]:
    """Class probabilities in one form, the observed labels, and which of these count (None: all), each ``(B, E)``.

    In the place of those that do not count is 0.
    """
    given = score_tensor("y", y)
    table = class_table(prediction, y=given)
    observed = by_row(align_target(target(given, table.shape[0], device=table.probs.device), table.shape[1:]))
    counted = _refuse_none(prediction.counted(observed) if isinstance(prediction, Prediction) else None)
    observed = observed if counted is None else observed.where(counted, 0)
    return table, _check_labels(observed, table.probs.shape[-1]), counted


def _check_labels(y: Tensor, classes: int) -> Tensor:
    labels = y.long()
    bad = (labels != y) | (labels < 0) | (labels >= classes)
    if bad.any():
        row = int(torch.nonzero(by_row(bad).any(1))[0])
        raise InvalidData(
            f"y must hold class labels, whole numbers from 0 to {classes - 1}; got {y[bad][0].item():g} in row {row} "
            f"(counting from 0). Renumber the labels, or predict all {classes} classes that y can take."
        )
    return labels
