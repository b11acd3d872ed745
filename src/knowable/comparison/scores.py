"""The scores that methods are compared by: their names, which way is better, and what they mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from knowable.core.support.checks import check_choice
from knowable.errors import InvalidArgument


@dataclass(frozen=True)
class ScoreKind:
    """One score.

    Attributes:
        name: Its key in mappings, tables and files.
        label: Its heading.
        better: ``"lower"``, ``"higher"``, ``"target"`` (the nearer to ``target`` the better) or ``"none"``.
        help: What it means, in a sentence.
        target: The value a calibrated method would have.
    """

    name: str
    label: str
    better: str
    help: str
    target: float | None = None

    def __post_init__(self) -> None:
        check_choice("better", self.better, ("lower", "higher", "target", "none"))

    @property
    def ranks(self) -> bool:
        """Whether methods can be put in order by it, fold by fold."""
        return self.better in ("lower", "higher")

    @property
    def direction(self) -> str:
        """Which way is better, in words."""
        if self.better == "target":
            return f"{self.target:g} is right"
        return {"lower": "lower is better", "higher": "higher is better", "none": ""}[self.better]


KINDS = (
    ScoreKind("nll", "NLL", "lower", "Mean negative log predictive density of rows held out, in nats: judges the whole "
              "predictive distribution, and punishes confident mistakes most."),
    ScoreKind("crps", "CRPS", "lower", "Continuous ranked probability score, in the unit of the outcome: judges the "
              "whole distribution too, but forgives outliers more. The absolute error, where there is no spread."),
    ScoreKind("rmse", "RMSE", "lower", "Root mean squared error of the predicted means, in the unit of the outcome."),
    ScoreKind("accuracy", "accuracy", "higher", "Share of labels predicted right."),
    ScoreKind("brier", "Brier", "lower", "Squared error of the predicted probabilities, summed over classes."),
    ScoreKind("ece", "calibration error", "lower", "How far promised probabilities are from what happened: those of "
              "intervals at many levels (numbers) or of the predicted labels (classes). 0 is calibrated; "
              "few rows alone make it larger."),
    ScoreKind("coverage_90", "coverage of 90%", "target", "Share of outcomes inside their central 90% interval.", 0.9),
    ScoreKind("interval_width_90", "width of 90%", "lower", "Sharpness: mean width of the central 90% intervals, in "
              "the unit of the outcome. Narrower is better only among methods with the right coverage."),
    ScoreKind("mean_entropy", "mean entropy", "none", "Sharpness: mean entropy of the predicted probabilities (nats). "
              "0 is certain of everything."),
    ScoreKind("auroc_outside", "AUROC outside", "higher", "Probability that a row from outside is more uncertain than "
              "one held out. 1 is perfect, 0.5 is chance."),
    ScoreKind("reference_distance", "distance to reference", "lower", "How far the functions are from those of the "
              "reference: Wasserstein distance in standard deviations of the reference (numbers), or total variation "
              "of the probabilities (classes)."),
    ScoreKind("seconds", "fit, s", "lower", "Seconds that a fit took."),
    ScoreKind("predict_seconds", "predict, s", "lower", "Seconds that predicting the rows held out took."),
    ScoreKind("memory_mb", "memory, MB", "lower", "Peak resident memory of a fit above what was held before it, in "
              "megabytes; what earlier fits freed but the process kept is not counted. Measured on Linux only."),
)  # fmt: skip
"""Every score, in the order of tables."""

BY_NAME = {kind.name: kind for kind in KINDS}
FIRST = "nll"
"""What methods are ranked by unless asked otherwise."""

_MOST_DECIMALS = 6


def kinds_in(names: Iterable[str]) -> tuple[ScoreKind, ...]:
    """The kinds of the scores that are there, in the order of tables."""
    there = set(names)
    return tuple(kind for kind in KINDS if kind.name in there)


def ranking_kind(name: str, there: Iterable[str]) -> ScoreKind:
    """The kind of a score that methods can be ranked by, or an error that names those that there are."""
    able = [kind.name for kind in kinds_in(there) if kind.ranks]
    if name not in able:
        raise InvalidArgument(
            f"score must be one that ranks methods: {', '.join(able) or 'there is none'}; got {name!r}."
        )
    return BY_NAME[name]


def shown(value: float, error: float = math.nan) -> str:
    """A number with the digits that its standard error leaves it, or four where there is none."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "-∞")
    if not math.isfinite(error) or error <= 0:
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    return f"{value:.{_decimals(error)}f}"


def with_error(value: float, error: float, *, sign: bool = False) -> str:
    """``"2.94 ± 0.03"``: the error with two digits, the value to the same place."""
    text = shown(value, error)
    if sign and math.isfinite(value) and value >= 0:
        text = f"+{text}"
    if not math.isfinite(value) or not math.isfinite(error):
        return text
    return f"{text} ± {error:.{_decimals(error)}f}" if error > 0 else f"{text} ± 0"


def _decimals(error: float) -> int:
    """Places after the point, so that the error has two digits."""
    return min(_MOST_DECIMALS, max(0, 1 - math.floor(math.log10(error))))
