"""Predictions as rows of a table."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from knowable.core.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.errors import Unsupported


def prediction_rows(
    prediction: Prediction, lines: Sequence[int], *, classes: Sequence[str] = (), level: float = 0.9
) -> list[dict[str, Any]]:
    """One mapping for each row, ready for CSV or JSON.

    Numbers: ``line, mean, std, low, high, aleatoric_std, epistemic_std``, all in the outcome's unit. Classes: ``line,
    label, probability, p(name) ..., entropy, aleatoric, epistemic`` in nats.

    Args:
        prediction: In the user's units.
        lines: Where each row is in the file it came from.
        classes: Names of the classes.
        level: Of the interval from ``low`` to ``high``.
    """
    if isinstance(prediction, RegressionPrediction):
        columns = _numbers(prediction, level)
    elif isinstance(prediction, ClassPrediction):
        columns = _classes(prediction, classes)
    else:
        raise Unsupported(f"A {type(prediction).__name__} cannot be written as a table.")
    names = ["line", *columns]
    return [dict(zip(names, row, strict=True)) for row in zip(lines, *columns.values(), strict=True)]


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, numbers in full."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _numbers(prediction: RegressionPrediction, level: float) -> dict[str, list[float]]:
    if prediction.mean[0].numel() != 1:
        raise Unsupported("The command line writes one outcome a row. Use predict_dist of the estimator for several.")
    low, high = prediction.interval(level)
    found = {
        "mean": prediction.mean,
        "std": prediction.std,
        "low": low,
        "high": high,
        "aleatoric_std": prediction.aleatoric.sqrt(),
        "epistemic_std": prediction.epistemic.clamp_min(0.0).sqrt(),
    }
    return {name: _round(values.detach().double().reshape(-1).tolist()) for name, values in found.items()}


def _classes(prediction: ClassPrediction, classes: Sequence[str]) -> dict[str, list[Any]]:
    probs = prediction.probs.detach().double()
    labels = prediction.labels.reshape(-1).tolist()
    columns: dict[str, list[Any]] = {
        "label": [classes[label] for label in labels],
        "probability": _round([probs[row, label].item() for row, label in enumerate(labels)]),
    }
    columns |= {f"p({name})": _round(probs[:, place].tolist()) for place, name in enumerate(classes)}
    uncertainty = {
        "entropy": prediction.total,
        "aleatoric": prediction.aleatoric,
        "epistemic": prediction.epistemic,
    }
    return columns | {name: _round(value.detach().double().reshape(-1).tolist()) for name, value in uncertainty.items()}


def _round(values: list[float]) -> list[float]:
    """Nine significant digits: more than single precision holds."""
    return [float(f"{value:.9g}") if math.isfinite(value) else value for value in values]
