"""What to reject at which risk: a table whose every line is a guarantee."""

from __future__ import annotations

from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.evaluation.inputs import by_row, in_double
from knowable.evaluation.risk_control import RejectionRule, rejection_rule, rows_for_risk
from knowable.report.report import Listing

RISKS = (0.1, 0.05, 0.02, 0.01)  # shares of wrong labels that might be tolerated
DELTA = 0.05  # probability that a line does not hold
TOLERANCES = (1.0, 0.5, 0.25)  # of an error, in standard deviations of the outcome
RISK_OF_NUMBERS = 0.1  # share of errors beyond the tolerance


def rejection_listing(
    prediction: Prediction, y: Tensor, *, scale: float = 1.0, title: str = "What to reject at which risk"
) -> Listing | None:
    """Up to which uncertainty to accept predictions, so that few of the accepted are wrong.

    Args:
        prediction: Of rows that were not used in the fit.
        y: Their outcomes.
        scale: Standard deviation of the training outcomes, for numbers: tolerances are parts of it.
        title: Of the table.

    Returns:
        None where there are several outcomes in a row.
    """
    if isinstance(prediction, ClassPrediction) and prediction.labels.numel() == len(prediction):
        return _labels(prediction, y, title)
    if isinstance(prediction, RegressionPrediction) and prediction.mean.numel() == len(prediction):
        return _numbers(prediction, y, scale, title)
    return None


def certified_rule(uncertainty: Tensor, wrong: Tensor, risk: float) -> RejectionRule | None:
    """The rule that keeps a risk with probability 1 - :data:`DELTA`; None where there are too few rows for any."""
    return rejection_rule(uncertainty, wrong, risk, DELTA) if len(wrong) >= rows_for_risk(risk, DELTA) else None


def _labels(prediction: ClassPrediction, y: Tensor, title: str) -> Listing:
    entropy = in_double(prediction.total).flatten()
    wrong = prediction.labels.flatten().long() != y.flatten().long()
    rows = [(f"{risk:.0%}", *_cells(certified_rule(entropy, wrong, risk), risk, "nats")) for risk in RISKS]
    headings = ("At most wrong", "Accept up to an entropy of", "Accepted", "Wrong among those")
    return Listing(title, headings, tuple(rows), note=_note(len(y)))


def _numbers(prediction: RegressionPrediction, y: Tensor, scale: float, title: str) -> Listing:
    std = in_double(prediction.std).flatten()
    error = by_row(in_double(prediction.mean) - y.double().reshape(prediction.mean.shape)).abs()[:, 0]
    rows = [
        (f"{part * scale:.3g}", *_cells(certified_rule(std, error > part * scale, RISK_OF_NUMBERS), RISK_OF_NUMBERS))
        for part in TOLERANCES
    ]
    headings = (
        f"At most {RISK_OF_NUMBERS:.0%} off by more than", "Accept up to a standard deviation of", "Accepted",
        "Off by more, among those",
    )  # fmt: skip
    return Listing(title, headings, tuple(rows), note=_note(len(y)))


def _cells(rule: RejectionRule | None, risk: float, unit: str = "") -> tuple[str, str, str]:
    if rule is None:
        return (f"needs {rows_for_risk(risk, DELTA):,} held-out rows", "–", "–")
    if not rule.certified:
        return ("reject all", "0%", "–")
    return (f"{rule.threshold:.3g} {unit}".rstrip(), f"{rule.accepted:.0%}", f"{rule.risk:.1%}")


def _note(rows: int) -> str:
    return (
        f"Each line holds for new rows like the {rows:,} held-out ones with probability {1 - DELTA:.0%} (an exact "
        f"binomial bound). The last two columns are of those held-out rows on which the line was tested."
    )
