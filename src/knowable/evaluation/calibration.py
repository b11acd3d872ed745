"""Calibration: do events forecast with probability p happen a share p of the time?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prediction.plots import binned
from knowable.core.prediction.prediction import Prediction, RegressionPrediction, align_target
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.errors import InvalidData, InvalidType
from knowable.evaluation.bootstrap import bootstrap_error
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
    """Accuracy against confidence, in bins.

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


def ece(
    prediction: Prediction | Array, y: Array, *, bins: int = 15, binning: str = "width", classwise: bool = False
) -> float:
    r"""Expected calibration error.

    For classes: predictions are put in bins by the probability of their most probable label, and accuracy is compared
    with mean confidence (Naeini et al., 2015; Guo et al., 2017).

    .. math:: \sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    For numbers: the mean absolute difference between observed and nominal coverage of central intervals, over ``bins``
    levels spread evenly over (0, 1), after Kuleshov et al. (2018). Both are 0 for a calibrated prediction and many
    rows; with few rows both are above 0 by chance.

    Args:
        prediction: A Prediction, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Observed outcomes.
        bins: Number of bins, or of levels.
        binning: Bins of equal ``"width"``, or of equal ``"mass"``: with about as many predictions each (Nguyen and
            O'Connor, 2015). Not for numbers.
        classwise: The mean over classes c of the error of "the label is c" (Kull et al., 2019), which also sees what
            probabilities are given to labels that are not the most probable one.

    Returns:
        The error, between 0 and 1; lower is better.

    Example:
        >>> ece([0.75, 0.75, 0.75, 0.75], [1, 1, 1, 0])
        0.0
    """
    if isinstance(prediction, RegressionPrediction):
        count = check_count("bins", bins)
        return coverage_curve(prediction, y, [(index + 0.5) / count for index in range(count)]).error
    if classwise:
        return class_calibration(prediction, y, bins=bins, binning=binning).mean().item()
    return reliability_curve(prediction, y, bins=bins, binning=binning).error


@torch.no_grad()
def ece_error(prediction: Prediction | Array, y: Array, *, bins: int = 15) -> float:
    """Standard error of :func:`ece` with its default binning, by the bootstrap over rows."""
    if isinstance(prediction, RegressionPrediction):
        below, above, counted = _transform(prediction, y)
        chosen = torch.ones_like(above, dtype=torch.bool) if counted is None else counted
        levels = [(index + 0.5) / bins for index in range(bins)]
        inside = [(_share_inside(below, above, level) * chosen).sum(1) for level in levels]
        rows = torch.stack([*inside, chosen.sum(1).double()], 1)
        nominal = torch.tensor(levels, dtype=torch.float64)
        return bootstrap_error(rows, lambda sums: (sums[:, :-1] / sums[:, -1:] - nominal).abs().mean(1))
    confidence, right, counted = _confidence(prediction, y)
    chosen = torch.ones_like(confidence, dtype=torch.bool) if counted is None else counted
    edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=confidence.device)
    index = torch.bucketize(confidence, edges[1:-1])
    gaps = torch.zeros((len(confidence), bins), dtype=torch.float64, device=confidence.device)
    gaps.scatter_add_(1, index, (right - confidence) * chosen)
    rows = torch.cat([gaps, chosen.sum(1, keepdim=True).double()], 1)
    return bootstrap_error(rows, lambda sums: sums[:, :-1].abs().sum(1) / sums[:, -1])


@torch.no_grad()
def class_calibration(prediction: Prediction | Array, y: Array, *, bins: int = 15, binning: str = "width") -> Tensor:
    """The calibration error of each class against all others, ``(C,)``; their mean is ``ece(..., classwise=True)``."""
    probs, hits = _each_class(prediction, y)
    return torch.stack([_gap(p, hit, bins, binning) for p, hit in zip(probs, hits, strict=True)])


@torch.no_grad()
def rms_calibration_error(
    prediction: Prediction | Array, y: Array, *, bins: int = 15, binning: str = "mass", debiased: bool = True
) -> float:
    r"""Root mean square calibration error of the most probable labels.

    .. math:: \sqrt{\sum_b \frac{n_b}{n} \Big[(\mathrm{accuracy}_b - \mathrm{confidence}_b)^2
        - \frac{\mathrm{accuracy}_b (1 - \mathrm{accuracy}_b)}{n_b - 1}\Big]}

    The second term is what chance alone adds to the first, so that a calibrated prediction has an error of about 0 also
    with few rows (Kumar, Liang and Ma, 2019); :func:`ece` has not.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        bins: Number of bins.
        binning: Bins of equal ``"mass"``, or of equal ``"width"``.
        debiased: Whether to subtract the second term. Bins with one row have none and are left out.

    Returns:
        The error, between 0 and 1; where the sum is negative, 0.

    Example:
        >>> rms_calibration_error([0.75, 0.75, 0.75, 0.75], [1, 1, 0, 0], debiased=False)
        0.25
    """
    curve = reliability_curve(prediction, y, bins=bins, binning=binning)
    filled = curve.count > (1 if debiased else 0)
    accuracy, count = curve.accuracy[filled], curve.count[filled]
    squares = (accuracy - curve.confidence[filled]).square()
    if debiased:
        squares = squares - accuracy * (1 - accuracy) / (count - 1)
    return max(0.0, ((squares * count).sum() / curve.count.sum()).item()) ** 0.5


def _gap(p: Tensor, hit: Tensor, bins: int, binning: str) -> Tensor:
    """Σ n_b / n |mean hit - mean p|."""
    _, middle, share, count = binned(p, hit, _edges(p, bins, binning))
    filled = count > 0
    return ((share - middle)[filled].abs() * count[filled]).sum() / count.sum()


def _edges(confidence: Tensor, bins: int, binning: str) -> Tensor:
    """Edges of the bins from 0 to 1; equal values are in the same bin, and so there may be fewer of equal mass."""
    if check_choice("binning", binning, ("width", "mass")) == "width":
        return torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=confidence.device)
    ordered = confidence.sort().values
    ends = (torch.arange(1, bins, device=confidence.device) * len(ordered) / bins).round().long().clamp_min(1) - 1
    inner = ordered[ends].unique()
    inner = inner[(inner > 0) & (inner < 1)]
    return torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])


def _confidence(prediction: Prediction | Array, y: Array) -> tuple[Tensor, Tensor, Tensor | None]:
    """Confidence of the predicted labels, whether they are right, and which count (None: all), each ``(B, E)``."""
    table, observed, counted = classes_and_target(prediction, y)
    confidence = table.probs.gather(-1, table.labels.unsqueeze(-1)).squeeze(-1)
    return confidence, (table.labels == observed).double(), counted


def _each_class(prediction: Prediction | Array, y: Array) -> tuple[Tensor, Tensor]:
    """Probabilities and one-hot labels of all that count, class by class, ``(C, N)``."""
    table, observed, counted = classes_and_target(prediction, y)
    hits = torch.nn.functional.one_hot(observed, table.probs.shape[-1]).double()
    some = torch.ones_like(observed, dtype=torch.bool) if counted is None else counted
    return table.probs[some].T.contiguous(), hits[some].T.contiguous()


@torch.no_grad()
def reliability_curve(
    prediction: Prediction | Array, y: Array, bins: int = 15, *, binning: str = "width"
) -> ReliabilityCurve:
    """Accuracy against confidence of the predicted labels, as data for a reliability diagram.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        bins: Number of bins between 0 and 1.
        binning: Bins of equal ``"width"`` or equal ``"mass"``, see :func:`ece`.

    Returns:
        The curve.
    """
    bins = check_count("bins", bins)
    confidence, right, counted = _confidence(prediction, y)
    confidence, right = (each.flatten() if counted is None else each[counted] for each in (confidence, right))
    return ReliabilityCurve(*(each.cpu() for each in binned(confidence, right, _edges(confidence, bins, binning))))


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
