"""Predictions as plain values, ready for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.errors import Unsupported


def describe(prediction: Prediction, level: float, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A mapping for each row: numbers in the outcome's unit, or probabilities, and the parts of the uncertainty."""
    if isinstance(prediction, RegressionPrediction):
        low, high = prediction.interval(level)
        columns: dict[str, list[Any]] = {
            "mean": plain(prediction.mean),
            "std": plain(prediction.std),
            "low": plain(low),
            "high": plain(high),
            "aleatoric_std": plain(prediction.aleatoric.clamp_min(0.0).sqrt()),
            "epistemic_std": plain(prediction.epistemic.clamp_min(0.0).sqrt()),
        }
    elif isinstance(prediction, ClassPrediction):
        probs = prediction.log_mean_probs.double().exp()
        single = probs.dim() == 2
        labels = prediction.labels.reshape(len(probs), *probs.shape[2:]).tolist()
        names = list(classes) or [str(number) for number in range(probs.shape[1])]
        columns = {
            "label": [names[label] for label in labels] if single else labels,
            "probability": plain(probs.amax(1)),
            "probabilities": [dict(zip(names, row, strict=True)) for row in plain(probs)] if single else plain(probs),
            "entropy": plain(prediction.total),
            "aleatoric": plain(prediction.aleatoric),
            "epistemic": plain(prediction.epistemic),
        }
    else:
        raise Unsupported(f"A {type(prediction).__name__} cannot be served.")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def plain(values: Tensor) -> list[Any]:
    """One value, or nested lists of them, for each row; floats with nine digits."""
    values = values.detach().cpu()
    flat = values.double().reshape(len(values), -1) if values.is_floating_point() else values.reshape(len(values), -1)
    rounded = [_rounded(row) for row in flat.tolist()]
    if flat.shape[1] == 1:
        return [row[0] for row in rounded]
    return [_nested(row, values.shape[1:]) for row in rounded]


def _rounded(row: list[Any]) -> list[Any]:
    return [float(f"{each:.9g}") if isinstance(each, float) else each for each in row]


def _nested(row: list[Any], shape: Sequence[int]) -> list[Any]:
    if len(shape) == 1:
        return row
    step = len(row) // shape[0]
    return [_nested(row[step * part : step * (part + 1)], shape[1:]) for part in range(shape[0])]


def labels_in(inside: list[bool], classes: Sequence[str]) -> list[str]:
    """Names of the labels that are in a set."""
    return [classes[number] if classes else str(number) for number, there in enumerate(inside) if there]


def all_finite(value: Any) -> bool:
    """Whether every number in it is."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(all_finite, value.values()))
    return all(map(all_finite, value)) if isinstance(value, list) else True
