"""Scores as tables: their names, which way is better, what they mean, and how they are written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from knowable.core.support.checks import check_choice
from knowable.errors import InvalidArgument

_MOST_DECIMALS = 6
_LARGE = 1e7  # from which on numbers are written in powers of ten
_TIES = "± is one standard error; ★ marks the best of a column, a light tint those within one standard error of it."


@dataclass(frozen=True)
class ScoreColumn:
    """One score."""

    name: str  # its key in mappings, tables and files
    label: str
    better: str = "lower"  # ``"lower"``, ``"higher"``, ``"target"`` (nearest to ``target`` is best) or ``"none"``
    target: float | None = None  # the value a calibrated method would have
    decimals: int = 3
    percent: bool = False  # whether it is a share, shown in percent
    help: str = ""

    def __post_init__(self) -> None:
        check_choice("better", self.better, ("lower", "higher", "target", "none"))
        if (self.better == "target") != (self.target is not None):
            raise InvalidArgument(f"Column {self.name!r}: a target is given exactly when better='target'.")

    @property
    def ranks(self) -> bool:
        """Whether methods can be put in order by it."""
        return self.better in ("lower", "higher")

    @property
    def direction(self) -> str:
        """Which way is better, in words."""
        if self.target is not None:
            return f"{self.show(self.target)} is right"
        return f"{self.better} is better" if self.ranks else ""

    def loss(self, value: float) -> float:
        """A number that is smallest for the best method."""
        if self.better == "target":
            return abs(value - float(self.target or 0.0))
        return -value if self.better == "higher" else value

    def show(self, value: float) -> str:
        """The value as it is printed."""
        if not math.isfinite(value):
            return "–"
        return f"{100 * value:.{self.decimals}f}%" if self.percent else f"{value:.{self.decimals}f}"


@dataclass(frozen=True)
class Cell:
    """One score of one method."""

    value: float
    standard_error: float | None
    text: str
    error_text: str
    mark: str  # "best", "tied" (within one standard error of the best) or ""


@dataclass(frozen=True)
class ScoreTable:
    """Scores of several methods on the same rows."""

    title: str
    note: str  # how it was scored (which rows, how many)
    columns: tuple[ScoreColumn, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]  # ``(method, cells)`` pairs, cells in the order of ``columns``
    legend: str = _TIES

    def cell(self, method: str, key: str) -> Cell:
        """The cell of one method and score."""
        place = [column.name for column in self.columns].index(key)
        return dict(self.rows)[method][place]


_COLUMNS = (
    ScoreColumn("nll", "NLL", help="Negative log predictive density (log probability for classes), in nats per row: "
                "judges the whole predictive distribution, and punishes confident mistakes most."),
    ScoreColumn("crps", "CRPS", help="Continuous ranked probability score, in the unit of the outcome: judges the "
                "whole distribution, less sensitive to outliers than NLL. For a point prediction: the absolute error."),
    ScoreColumn("rmse", "RMSE", help="Root mean squared error of the predicted mean, in the unit of the outcome."),
    ScoreColumn("accuracy", "Accuracy", "higher", decimals=1, percent=True, help="Share of correct labels."),
    ScoreColumn("brier", "Brier score", help="Squared error of the predicted probabilities, summed over classes: 0 is "
                "perfect, 2 the worst."),
    ScoreColumn("ece", "Calibration error", help="Expected calibration error: mean distance between nominal and "
                "observed coverage over all levels (numbers), or between confidence and accuracy (classes). 0 is "
                "calibrated; with few rows chance alone makes it larger."),
    ScoreColumn("coverage_90", "90% coverage", "target", target=0.9, decimals=1, percent=True, help="Share of outcomes "
                "inside their central 90% interval. Less is overconfident, more is underconfident."),
    ScoreColumn("interval_width_90", "90% width", "lower", help="Sharpness: mean width of the central 90% interval, in "
                "the unit of the outcome. Narrower is better only among methods with the right coverage."),
    ScoreColumn("mean_entropy", "Entropy", "none", help="Mean entropy of the predicted probabilities (total "
                "uncertainty), in nats. 0 is certain of everything."),
    ScoreColumn("mean_mutual_information", "Mutual information", "none", decimals=4, help="Mean mutual information "
                "between label and weights, the epistemic part of the entropy, in nats."),
    ScoreColumn("mean_std", "Mean std", "none", help="Mean standard deviation of the predictions, in the unit of the "
                "outcome."),
    ScoreColumn("auroc_outside", "AUROC outside", "higher", help="Probability that a row from outside the data is more "
                "uncertain than a held-out one. 1 is perfect, 0.5 is chance."),
    ScoreColumn("reference_distance", "Distance to reference", help="Distance between the predictive functions of a "
                "method and of the reference: Wasserstein, in standard deviations of the reference (numbers), or total "
                "variation of the probabilities (classes)."),
    ScoreColumn("seconds", "Fit, s", decimals=1, help="Seconds per fit."),
    ScoreColumn("predict_seconds", "Predict, s", help="Seconds to predict the held-out rows."),
    ScoreColumn("memory_mb", "Memory, MB", help="Peak resident memory of a fit above what the process held before it, "
                "in megabytes. Measured on Linux only."),
)  # fmt: skip

SCORES = {column.name: column for column in _COLUMNS}
"""Every score by its name, in the order of tables."""


def score_table(
    title: str,
    scores: Mapping[str, Mapping[str, float]],
    columns: Sequence[ScoreColumn],
    *,
    note: str = "",
    standard_errors: Mapping[str, Mapping[str, float]] | None = None,
) -> ScoreTable:
    """Arrange scores by method and mark the best of each column."""
    errors = standard_errors or {}
    marks = {column.name: _marks(column, scores, errors) for column in columns}
    rows = tuple(
        (
            method,
            tuple(
                _cell(column, each, errors.get(method, {}), marks[column.name].get(method, "")) for column in columns
            ),
        )
        for method, each in scores.items()
    )
    return ScoreTable(title, note, tuple(columns), rows)


def _cell(column: ScoreColumn, scores: Mapping[str, float], errors: Mapping[str, float], mark: str) -> Cell:
    value = float(scores.get(column.name, math.nan))
    error = errors.get(column.name)
    error = float(error) if error is not None and math.isfinite(error) else None
    error_text = "" if error is None or not math.isfinite(value) else f"± {column.show(error)}"
    return Cell(value, error, column.show(value), error_text, mark)


def _marks(
    column: ScoreColumn, scores: Mapping[str, Mapping[str, float]], errors: Mapping[str, Mapping[str, float]]
) -> dict[str, str]:
    """``best`` and ``tied`` methods of one column; nothing where there is no better or worse, or only one method."""
    losses = {
        method: column.loss(float(each[column.name]))
        for method, each in scores.items()
        if column.name in each and math.isfinite(each[column.name])
    }
    if column.better == "none" or len(losses) < 2:
        return {}
    best = min(losses, key=losses.__getitem__)

    def spread(method: str) -> float:
        pair = [errors.get(name, {}).get(column.name, 0.0) for name in (method, best)]
        return math.hypot(*(error if math.isfinite(error) else 0.0 for error in pair))

    tied = {method for method, loss in losses.items() if loss - losses[best] <= spread(method)}
    return {method: "best" if losses[method] == losses[best] else "tied" for method in tied | {best}}


def shown(value: float, error: float = math.nan) -> str:
    """A number with the digits that its standard error leaves it, or four where there is none."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if not math.isfinite(error) or error <= 0:
        return f"{value:.0f}" if 10_000 <= abs(value) < _LARGE else f"{value:.4g}"
    if _in_powers(value, error):
        return f"{value:.{max(0, _exponent(value) - _exponent(error) + 1)}e}"
    return f"{value:.{_decimals(error)}f}"


def with_error(value: float, error: float, *, sign: bool = False) -> str:
    """``"2.94 ± 0.03"``: the error with two digits, the value to the same place."""
    text = shown(value, error)
    if sign and math.isfinite(value) and value >= 0:
        text = f"+{text}"
    if not math.isfinite(value) or not math.isfinite(error):
        return text
    if error <= 0:
        return f"{text} ± 0"
    return f"{text} ± {error:.1e}" if _in_powers(value, error) else f"{text} ± {error:.{_decimals(error)}f}"


def _in_powers(value: float, error: float) -> bool:
    """Whether a number is so large, or its error so small, that powers of ten are easier to read."""
    return max(abs(value), error) >= _LARGE or error < 10.0**-_MOST_DECIMALS


def _exponent(value: float) -> int:
    return math.floor(math.log10(abs(value))) if value else 0


def _decimals(error: float) -> int:
    """Places after the point, so that the error has two digits."""
    return min(_MOST_DECIMALS, max(0, 1 - math.floor(math.log10(error))))
