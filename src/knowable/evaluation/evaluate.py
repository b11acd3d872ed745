"""All scores for a prediction's kind of outcome, with their standard errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.data import column_of
from knowable.core.prediction.joint import JointPrediction
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.errors import InvalidType
from knowable.evaluation.calibration import coverage_rows, ece, ece_error, interval_width_rows
from knowable.evaluation.inputs import Array, by_row, in_double, rows_that_count
from knowable.evaluation.scores import accuracy_rows, brier_rows, crps_rows, nll_rows, squared_error_rows


class Scores(Mapping[str, float]):
    """Named scores of one prediction: a read-only mapping that prints as a table.

    Attributes:
        standard_errors: Standard error of each score: of the mean over rows, of ``rmse`` by the delta method, of
            ``ece`` by the bootstrap; NaN with a single row. All pixels or outputs of a row count together.
        per_row: The values behind the means, one for each row that counts, ``(B,)`` each, for paired comparisons of two
            predictions of the same data. The mean of ``per_row["squared_error"]`` is the square of ``rmse``.
    """

    def __init__(
        self, values: Mapping[str, float], *, standard_errors: Mapping[str, float], per_row: Mapping[str, Tensor]
    ):
        self._values = dict(values)
        self.standard_errors = dict(standard_errors)
        self.per_row = dict(per_row)

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def to_dict(self) -> dict[str, float]:
        """The scores as an ordinary dict."""
        return dict(self._values)

    def __repr__(self) -> str:
        width = max(map(len, self._values))
        numbers = {name: f"{value:.4g}" for name, value in self._values.items()}
        room = max(map(len, numbers.values()))
        lines = [f"{name:<{width}}  {text:>{room}}{self._plus_minus(name)}" for name, text in numbers.items()]
        rows = len(next(iter(self.per_row.values())))
        return f"Scores on {rows} row{'s' if rows != 1 else ''}\n" + "\n".join(f"  {line}" for line in lines)

    def _plus_minus(self, name: str) -> str:
        error = self.standard_errors.get(name, math.nan)
        return f" ± {error:.2g}" if math.isfinite(error) else ""


_RENAMED = {
    "squared_error": "rmse",
    "std": "mean_std",
    "entropy": "mean_entropy",
    "mutual_information": "mean_mutual_information",
}
_ORDER = (
    *("nll", "rmse", "crps", "coverage_90", "interval_width_90", "accuracy", "brier"),
    *("ece", "mean_std", "mean_entropy", "mean_mutual_information"),
)


@torch.no_grad()
def evaluate(prediction: Prediction, y: Array) -> Scores:
    """Score a prediction with all scores for its kind of outcome.

    Numbers: ``nll``, ``rmse``, ``crps``, ``coverage_90``, ``interval_width_90``, ``ece``, ``mean_std``. Classes:
    ``nll``, ``accuracy``, ``brier``, ``ece``, ``mean_entropy``, ``mean_mutual_information`` (in nats). See
    ``knowable.metrics`` for what each is. Several outcomes (``Joint``): ``nll`` of all together, and the scores of each
    behind its name, as ``price.rmse``.

    Args:
        prediction: What ``posterior.predict(x)`` returned.
        y: What was observed at the same inputs; or the Dataset or DataLoader of pairs that was predicted.

    Returns:
        The scores, always in this order.

    Raises:
        InvalidType: If ``prediction`` is not a Prediction.
        InvalidData: If ``y`` does not fit it, is empty, or has missing values.
    """
    y = column_of(y, 1)
    if isinstance(prediction, JointPrediction):
        return _scores_by_name(prediction, y)
    rows = rows_that_count(prediction, y) if isinstance(prediction, Prediction) else None
    some = slice(None) if rows is None else rows
    if isinstance(prediction, RegressionPrediction):
        per_row = {
            "nll": nll_rows(prediction, y),
            "squared_error": squared_error_rows(prediction, y),
            "crps": crps_rows(prediction, y),
            "coverage_90": coverage_rows(prediction, y, level=0.9),
            "interval_width_90": interval_width_rows(prediction, level=0.9)[some],
            "std": by_row(in_double(prediction.std)).mean(1)[some],
        }
    elif isinstance(prediction, ClassPrediction):
        per_row = {
            "nll": nll_rows(prediction, y),
            "accuracy": accuracy_rows(prediction, y),
            "brier": brier_rows(prediction, y),
            "entropy": by_row(in_double(prediction.total)).mean(1)[some],
            "mutual_information": by_row(in_double(prediction.epistemic)).mean(1)[some],
        }
    else:
        raise InvalidType(
            f"prediction must be a Prediction, what posterior.predict(x) returns; got a {type(prediction).__name__}. "
            f"For plain tensors use the functions in knowable.metrics."
        )
    values, errors = {"ece": ece(prediction, y)}, {"ece": ece_error(prediction, y)}
    for name, rows in per_row.items():
        score = _RENAMED.get(name, name)
        values[score] = rows.mean().item()
        errors[score] = _standard_error(rows, share=score in ("coverage_90", "accuracy"))
    if "rmse" in values:
        values["rmse"] = math.sqrt(values["rmse"])
        errors["rmse"] /= 2 * values["rmse"] if values["rmse"] > 0 else 1.0  # d sqrt(m) = dm / (2 sqrt(m))
    return Scores(
        {name: values[name] for name in _ORDER if name in values},
        standard_errors={name: errors[name] for name in _ORDER if name in errors},
        per_row={name: rows.cpu() for name, rows in per_row.items()},
    )


def _scores_by_name(prediction: JointPrediction, y: Any) -> Scores:
    """The log density of all outcomes together, and the scores of each."""
    known = prediction.named(y)
    nll = -prediction.log_prob(known).double().cpu()
    values, per_row = {"nll": nll.mean().item()}, {"nll": nll}
    errors = {"nll": (nll.std() / math.sqrt(len(nll))).item() if len(nll) > 1 else math.nan}
    for head in prediction:
        scores = evaluate(prediction[head], known[head])
        values |= {f"{head}.{name}": value for name, value in scores.items()}
        errors |= {f"{head}.{name}": value for name, value in scores.standard_errors.items()}
        per_row |= {f"{head}.{name}": value for name, value in scores.per_row.items()}
    return Scores(values, standard_errors=errors, per_row=per_row)


def _standard_error(rows: Tensor, *, share: bool) -> float:
    """Of the mean over rows; a share of which all or none were seen is not known exactly (Agresti and Coull, 1998)."""
    count = len(rows)
    if count < 2:
        return math.nan
    error = rows.std().item()
    if error == 0.0 and share:
        middle = (rows.sum().item() + 2) / (count + 4)
        error = math.sqrt(middle * (1 - middle))
    return error / math.sqrt(count)
