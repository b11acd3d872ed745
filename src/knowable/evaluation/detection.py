"""Out-of-distribution detection and selective prediction: is uncertainty high off the data and where errors are?

Out-of-distribution points ("outside") should score higher than points like the training data ("inside").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction, RegressionPrediction, check_finite_target
from knowable.core.support.checks import check_number
from knowable.errors import InvalidData
from knowable.evaluation.inputs import (
    Array,
    by_row,
    check_rows,
    classes_and_target,
    in_double,
    means_and_target,
    score_tensor,
)


def auroc(inside: Prediction | Array, outside: Prediction | Array) -> float:
    r"""Area under the ROC curve: the probability that a point outside scores higher than a point inside.

    .. math:: P(s_{out} > s_{in}) + \tfrac12 P(s_{out} = s_{in})

    the rank statistic of Mann and Whitney (1947), exact with ties. 1 is perfect, 1/2 is chance.

    Args:
        inside: Uncertainty of points like the training data: any number of scores, or a Prediction, whose total
            uncertainty is taken for each row (averaged over outputs or pixels). For another kind of uncertainty pass
            that itself: ``prediction.epistemic``.
        outside: The same for points from elsewhere.

    Returns:
        The area.

    Example:
        >>> auroc([0.1, 0.2, 0.3], [0.3, 0.4])  # 5 pairs right, one tied, of 6
        0.916...
    """
    low, high = _two_samples(inside, outside)
    ordered = low.sort().values
    twice = torch.searchsorted(ordered, high) + torch.searchsorted(ordered, high, right=True)  # below, plus not above
    return twice.sum().item() / (2 * len(low) * len(high))


def aupr(inside: Prediction | Array, outside: Prediction | Array) -> float:
    r"""Area under the precision-recall curve, as average precision, with the points outside as those to find.

    .. math:: \sum_t (R_t - R_{t-1}) P_t

    over the distinct scores t from high to low, where precision P and recall R are those of "score at least t". Chance
    gives the share of points that are outside.

    Args:
        inside: Uncertainty of points like the training data, as in :func:`auroc`.
        outside: The same for points from elsewhere.

    Returns:
        The area; 1 is perfect.

    Example:
        >>> aupr([0.1, 0.2], [0.15, 0.3])  # 1/2 · 1 + 1/2 · 2/3
        0.833...
    """
    low, high = _two_samples(inside, outside)
    thresholds = torch.cat((low, high)).unique().flip(0)
    found, false_positives = _count_at_least(high, thresholds), _count_at_least(low, thresholds)
    recall = found.double() / len(high)
    precision = found.double() / (found + false_positives)
    steps = torch.diff(recall, prepend=recall.new_zeros(1))
    return (steps * precision).sum().item()


def tpr_at_fpr(inside: Prediction | Array, outside: Prediction | Array, fpr: float = 0.05) -> float:
    """True positive rate (share of points outside that are found) at a false positive rate of at most ``fpr``.

    Positive is "score above the threshold", with the lowest threshold that keeps the false positive rate: ties are
    never split, so with ties it may be lower than ``fpr``.

    Args:
        inside: Uncertainty of points like the training data, as in :func:`auroc`.
        outside: The same for points from elsewhere.
        fpr: False positive rate allowed, from 0 to 1.

    Returns:
        The true positive rate; higher is better.

    Example:
        >>> tpr_at_fpr([0.1, 0.2, 0.3, 0.4], [0.25, 0.35, 0.5, 0.6], fpr=0.25)
        0.75
    """
    low, high = _two_samples(inside, outside)
    return (high > threshold_at_fpr(low, fpr)).double().mean().item()


def threshold_at_fpr(inside: Prediction | Array, fpr: float = 0.05) -> float:
    """The lowest threshold above which at most a share ``fpr`` of the scores lies.

    Args:
        inside: Uncertainty of points like the training data, as in :func:`auroc`.
        fpr: False positive rate allowed, from 0 to 1.

    Returns:
        The threshold, one of the scores; minus infinity where all of them may lie above it.

    Example:
        >>> threshold_at_fpr([0.1, 0.2, 0.3, 0.4], fpr=0.25)
        0.3
    """
    fpr = check_number("fpr", fpr, at_least=0.0, at_most=1.0)
    low = sample_of_scores("inside", inside)
    allowed = _most_within(fpr, len(low))
    return -math.inf if allowed == len(low) else low.sort(descending=True).values[allowed].item()


def fpr95(inside: Prediction | Array, outside: Prediction | Array, tpr: float = 0.95) -> float:
    """False positive rate (share of points inside that are flagged) where 95% of the points outside are found.

    Positive is "score at least the threshold", with the highest threshold that finds the share ``tpr``. As in the
    other scores, points outside are those to find. Where the roles are changed ("95% of the points inside are
    accepted", as in ODIN), the rate is ``1 - tpr_at_fpr(inside, outside, 0.05)``.

    Args:
        inside: Uncertainty of points like the training data, as in :func:`auroc`.
        outside: The same for points from elsewhere.
        tpr: Share of the points outside that must be found, above 0.

    Returns:
        The false positive rate; 0 is perfect.

    Example:
        >>> fpr95([0.1, 0.2, 0.3, 0.4], [0.25, 0.35, 0.5, 0.6])
        0.5
    """
    tpr = check_number("tpr", tpr, above=0.0, at_most=1.0)
    low, high = _two_samples(inside, outside)
    found = len(high) - _most_within(1.0 - tpr, len(high))
    threshold = high.sort(descending=True).values[found - 1]
    return (low >= threshold).double().mean().item()


@dataclass(frozen=True)
class RiskCoverage:
    """Mean loss of the predictions that are kept when the most uncertain are rejected.

    Attributes:
        coverage: Share of predictions kept, ``(n,)``: 1/n, 2/n, ..., 1.
        risk: Mean loss of those kept, ``(n,)``.
    """

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """Area under the curve (AURC): the mean risk over all coverages. Lower is better."""
        return self.risk.mean().item()

    def __repr__(self) -> str:
        return f"RiskCoverage(predictions={len(self.risk)}, full risk={self.risk[-1]:.4g}, area={self.area:.4g})"


@torch.no_grad()
def risk_coverage(uncertainty: Prediction | Array, loss: Array) -> RiskCoverage:
    """The risk-coverage curve of selective prediction (El-Yaniv and Wiener, 2010; Geifman and El-Yaniv, 2017).

    Predictions are kept from the most certain on. Equally uncertain ones are a block: inside it the curve is the
    expectation over their random order, so the result does not depend on the order of the rows.

    Args:
        uncertainty: One number for each prediction, or a Prediction, whose total uncertainty is taken for each row and
            output or pixel.
        loss: The loss of each prediction; or with a Prediction what was observed, from which follow the 0-1 loss
            (classes) or the squared error (numbers).

    Returns:
        The curve.

    Example:
        >>> risk_coverage([0.1, 0.2, 0.9], [0.0, 0.0, 3.0]).risk
        tensor([0., 0., 1.], dtype=torch.float64)
    """
    order, losses = _uncertainty_and_loss(uncertainty, loss)
    _, block, count = order.unique(return_inverse=True, return_counts=True)
    mean = torch.zeros(len(count), dtype=losses.dtype, device=losses.device).index_add_(0, block, losses) / count
    kept = torch.arange(1, len(losses) + 1, dtype=losses.dtype, device=losses.device)
    risk = mean.repeat_interleave(count).cumsum(0) / kept
    return RiskCoverage((kept / len(losses)).cpu(), risk.cpu())


def _uncertainty_and_loss(uncertainty: Prediction | Array, loss: Array) -> tuple[Tensor, Tensor]:
    """Both flat."""
    if isinstance(uncertainty, RegressionPrediction):
        mean, observed, counted = means_and_target(uncertainty, loss)
        return _flat(uncertainty, (mean - observed).square(), counted)
    if isinstance(uncertainty, Prediction):
        table, labels, counted = classes_and_target(uncertainty, loss)
        return _flat(uncertainty, (table.labels != labels).double(), counted)
    scores = sample_of_scores("uncertainty", uncertainty)
    losses = check_finite_target(check_rows("loss", score_tensor("loss", loss, device=scores.device)), name="loss")
    if losses.numel() != len(scores):
        raise InvalidData(
            f"loss must have one number for each of {len(scores)} uncertainties, got shape {tuple(losses.shape)}. "
            f"Flatten both, or average the loss over outputs."
        )
    return scores, losses.double().flatten()


def _flat(prediction: Prediction, losses: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    total = in_double(prediction.total).flatten()
    return (total, losses.flatten()) if counted is None else (total[counted.flatten()], losses[counted])


def _two_samples(inside: Prediction | Array, outside: Prediction | Array) -> tuple[Tensor, Tensor]:
    low = sample_of_scores("inside", inside)
    return low, sample_of_scores("outside", outside).to(low.device)


@torch.no_grad()
def sample_of_scores(name: str, given: Prediction | Array) -> Tensor:
    """Scores as a flat vector; infinite ones are allowed, missing ones are not."""
    if isinstance(given, Prediction):
        scores = by_row(check_rows(name, score_tensor(name, given.total))).mean(1)
    else:
        scores = check_rows(name, score_tensor(name, given)).double().flatten()
    missing = torch.nonzero(torch.isnan(scores)).flatten()
    if len(missing):
        raise InvalidData(
            f"{name} has {len(missing)} missing values, the first at {missing[0].item()} (counting from 0). Drop them."
        )
    return scores


def _count_at_least(scores: Tensor, thresholds: Tensor) -> Tensor:
    return len(scores) - torch.searchsorted(scores.sort().values, thresholds)


def _most_within(share: float, count: int) -> int:
    """The largest m with m / count <= share; share * count may round to a neighbour of it."""
    near = round(share * count)
    return max(m for m in (near - 1, near, near + 1, 0) if m <= count and m / count <= share)
