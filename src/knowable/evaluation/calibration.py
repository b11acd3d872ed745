"""Calibration: do events forecast with probability p happen a share p of the time?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prediction.plots import binned
from knowable.core.prediction.prediction import Prediction, RegressionPrediction, align_target
from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidData, InvalidType
from knowable.evaluation.inputs import (
    Array,
    by_row,
    cdf,
    check_rows,
    classes_and_target,
    means_and_target,
    regression,
    row_means,
    score_tensor,
    target,
)


@dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy against confidence, in bins of equal width.

    Attributes:
        edges: Edges of the bins, ``(bins + 1,)``; a bin includes its upper edge.
        confidence: Mean probability of the predicted label in each bin, ``(bins,)``; NaN where the bin is empty.
        accuracy: Share of right labels in each bin, ``(bins,)``; NaN where the bin is empty.
        count: Number of predictions in each bin, ``(bins,)``.
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor

    @property
    def error(self) -> float:
        """Expected calibration error: the mean distance of accuracy from confidence, bins weighted by their counts."""
        filled = self.count > 0
        gaps = (self.accuracy - self.confidence)[filled].abs()
        return ((gaps * self.count[filled]).sum() / self.count.sum()).item()


@dataclass(frozen=True)
class CoverageCurve:
    """Observed against nominal coverage of central intervals.

    Attributes:
        levels: Nominal coverage, ``(L,)``.
        coverage: Observed coverage, ``(L,)``.
    """

    levels: Tensor
    coverage: Tensor

    @property
    def error(self) -> float:
        """Mean distance of observed from nominal coverage."""
        return (self.coverage - self.levels).abs().mean().item()


def ece(prediction: Prediction | Array, y: Array, *, bins: int = 15) -> float:
    r"""Expected calibration error.

    For classes: predictions are put in bins of equal width by the probability of their most probable label, and
    accuracy is compared with mean confidence (Naeini et al., 2015; Guo et al., 2017).

    .. math:: \sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    For numbers: the mean absolute difference between observed and nominal coverage of central intervals, over ``bins``
    levels spread evenly over (0, 1), after Kuleshov et al. (2018). Both are 0 for a calibrated prediction and many
    rows; with few rows both are above 0 by chance.

    Args:
        prediction: A Prediction, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Observed outcomes.
        bins: Number of bins, or of levels.

    Returns:
        The error, between 0 and 1; lower is better.

    Example:
        >>> ece([0.75, 0.75, 0.75, 0.75], [1, 1, 1, 0])
        0.0
    """
    if isinstance(prediction, RegressionPrediction):
        count = check_count("bins", bins)
        return coverage_curve(prediction, y, [(index + 0.5) / count for index in range(count)]).error
    return reliability_curve(prediction, y, bins=bins).error


@torch.no_grad()
def reliability_curve(prediction: Prediction | Array, y: Array, bins: int = 15) -> ReliabilityCurve:
    """Accuracy against confidence of the predicted labels, as data for a reliability diagram.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        bins: Number of bins of equal width between 0 and 1.

    Returns:
        The curve.
    """
    bins = check_count("bins", bins)
    table, observed, counted = classes_and_target(prediction, y)
    confidence = table.probs.gather(-1, table.labels.unsqueeze(-1)).squeeze(-1)
    right = (table.labels == observed).double()
    confidence, right = (each.flatten() if counted is None else each[counted] for each in (confidence, right))
    return ReliabilityCurve(*(each.cpu() for each in binned(confidence, right, bins)))


@torch.no_grad()
def coverage_curve(prediction: Prediction, y: Array, levels: Sequence[float] | Tensor | None = None) -> CoverageCurve:
    """Observed coverage of central intervals at many levels, as data for a calibration plot.

    An outcome lies in the central interval of a level exactly if its probability integral transform F(y) lies within
    half that level of 1/2. A count contributes the share of [F(y-1), F(y)] that does (Czado et al., 2009), so that a
    calibrated prediction over counts is on the diagonal too, although its intervals, which end at counts, cover more.

    Args:
        prediction: A Prediction over numbers.
        y: Observed numbers.
        levels: Nominal coverages, each above 0 and below 1; the default is 0.05, 0.1, ..., 0.95.

    Returns:
        The curve.
    """
    given = torch.arange(1, 20).double() / 20 if levels is None else score_tensor("levels", levels).flatten()
    checked = [check_number("levels", level, above=0.0, below=1.0) for level in given.tolist()]
    if not checked:
        raise InvalidData("levels is empty. Pass at least one number between 0 and 1.")
    below, above, counted = _transform(regression(prediction, "coverage_curve"), y)
    if counted is not None:
        below, above = below[counted], above[counted]
    return CoverageCurve(
        torch.tensor(checked, dtype=torch.float64),
        torch.tensor([_share_inside(below, above, level).mean().item() for level in checked], dtype=torch.float64),
    )


def _transform(prediction: RegressionPrediction, y: Array) -> tuple[Tensor, Tensor, Tensor | None]:
    """F just below ``y`` and at ``y``, one value where F is continuous, and which of them count, each ``(B, E)``."""
    _, observed, counted = means_and_target(prediction, y)
    observed = observed.view(prediction.mean.shape)
    above = cdf(prediction, observed)
    below = cdf(prediction, observed.ceil() - 1) if prediction.components.discrete else above
    return by_row(below), by_row(above), counted


def _share_inside(below: Tensor, above: Tensor, level: float) -> Tensor:
    """The share of each interval [below, above] that lies within ``level`` / 2 of 1/2."""
    low, high = (1 - level) / 2, (1 + level) / 2
    inside = (above.clamp_max(high) - below.clamp_min(low)).clamp_min(0.0) / (above - below)
    return torch.where(above > below, inside, ((above >= low) & (above <= high)).double())


def coverage(prediction: Prediction | tuple[Array, Array], y: Array, *, level: float = 0.9) -> float:
    """Share of outcomes inside their central interval, endpoints included; every output counts as one.

    Args:
        prediction: A Prediction over numbers, or the intervals themselves as a pair ``(low, high)``.
        y: Observed numbers.
        level: Probability the intervals of a Prediction should hold; not used with a pair.

    Returns:
        The share; for calibrated predictions close to ``level`` (for counts somewhat above it).

    Example:
        >>> coverage(([0.0, 0.0], [1.0, 1.0]), [0.5, 2.0])
        0.5
    """
    return coverage_rows(prediction, y, level=level).mean().item()


@torch.no_grad()
def coverage_rows(prediction: Prediction | tuple[Array, Array], y: Array, *, level: float = 0.9) -> Tensor:
    """Share of each row's outputs inside their interval, ``(B,)``; see :func:`coverage`."""
    level = check_number("level", level, above=0.0, below=1.0)
    if isinstance(prediction, Prediction):
        numbers, upper = regression(prediction, "coverage"), (1 + level) / 2
        below, above, counted = _transform(numbers, y)
        # quantile(q) is the smallest x with F(x) >= q: y >= quantile(q) iff F(y) >= q; y > quantile(q) iff F(y-) >= q
        not_over = below < upper if numbers.components.discrete else below <= upper
        return row_means(((above >= (1 - level) / 2) & not_over).double(), counted)
    low, high = _pair(prediction)
    observed = align_target(target(y, low.shape[0], device=low.device), low.shape[1:])
    return by_row((observed >= low) & (observed <= high)).double().mean(1)


def interval_width(prediction: Prediction | tuple[Array, Array], level: float = 0.9) -> float:
    """Mean width of the central intervals: among predictions with the right coverage, narrower is better.

    Args:
        prediction: A Prediction over numbers, or the intervals themselves as a pair ``(low, high)``.
        level: Probability the intervals of a Prediction should hold; not used with a pair.

    Returns:
        The width, in the unit of the outcome.

    Example:
        >>> interval_width(([0.0, 0.0], [1.0, 3.0]))
        2.0
    """
    return interval_width_rows(prediction, level=level).mean().item()


@torch.no_grad()
def interval_width_rows(prediction: Prediction | tuple[Array, Array], *, level: float = 0.9) -> Tensor:
    """Mean width of each row's intervals, ``(B,)``; see :func:`interval_width`."""
    level = check_number("level", level, above=0.0, below=1.0)
    if isinstance(prediction, Prediction):
        prediction = regression(prediction, "interval_width").interval(level)
    low, high = _pair(prediction)
    return by_row(high - low).mean(1)


def _pair(intervals: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
    """Lower and upper ends, checked."""
    if not isinstance(intervals, (tuple, list)) or len(intervals) != 2:
        raise InvalidType(
            f"prediction must be a Prediction over numbers or a pair (low, high) of tensors, got a "
            f"{type(intervals).__name__}."
        )
    low = check_rows("low", score_tensor("low", intervals[0])).double()
    high = check_rows("high", score_tensor("high", intervals[1], device=low.device)).double()
    if high.shape[0] != low.shape[0]:
        raise InvalidData(
            f"low has {low.shape[0]} rows but high has {high.shape[0]}. Pass both ends of every interval."
        )
    high = align_target(high, low.shape[1:], name="high")
    wrong = by_row(~(low <= high)).any(1)  # also where an end is missing; an infinite one is allowed
    if wrong.any():
        row = int(torch.nonzero(wrong)[0])
        raise InvalidData(
            f"low must be at most high, and neither missing; not so in row {row} (counting from 0): "
            f"{low[row].tolist()} and {high[row].tolist()}. Pass the pair as (low, high)."
        )
    return low, high
