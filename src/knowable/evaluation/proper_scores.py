"""Further proper scores: of intervals, of several outputs together, and the parts of the Brier score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction, align_target, check_finite_target
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidData
from knowable.evaluation.calibration import _each_class, _edges, _pair
from knowable.evaluation.inputs import (
    Array,
    by_row,
    check_rows,
    in_double,
    means_and_target,
    regression,
    row_means,
    score_tensor,
    target,
)

_VALUES_AT_ONCE = 4_000_000


def interval_score(prediction: Prediction | tuple[Array, Array], y: Array, *, level: float = 0.9) -> float:
    r"""Winkler's interval score: the width of the central interval and a fine for outcomes outside.

    .. math:: (u - l) + \tfrac{2}{\alpha} \max(l - y, 0) + \tfrac{2}{\alpha} \max(y - u, 0), \qquad
        \alpha = 1 - \mathrm{level}

    It is smallest for the true quantiles (Winkler, 1972; Gneiting and Raftery, 2007), and so joins coverage and width
    in one number.

    Args:
        prediction: A Prediction over numbers, or the intervals themselves as a pair ``(low, high)``.
        y: Observed numbers.
        level: Probability the intervals hold.

    Returns:
        The mean over rows and outputs, in the unit of the outcome; lower is better.

    Example:
        >>> round(interval_score(([0.0, 0.0], [1.0, 1.0]), [0.5, 1.5], level=0.9), 6)  # 1 and 1 + 20 · 0.5
        6.0
    """
    return interval_score_rows(prediction, y, level=level).mean().item()


@torch.no_grad()
def interval_score_rows(prediction: Prediction | tuple[Array, Array], y: Array, *, level: float = 0.9) -> Tensor:
    """Mean score of each row's intervals, ``(B,)``; see :func:`interval_score`."""
    level = check_number("level", level, above=0.0, below=1.0)
    if isinstance(prediction, Prediction):
        numbers = regression(prediction, "interval_score")
        _, observed, counted = means_and_target(numbers, y)
        low, high = (by_row(in_double(each)) for each in numbers.interval(level))
    else:
        low, high = _pair(prediction)
        observed = align_target(target(y, low.shape[0], device=low.device), low.shape[1:]).double()
        low, high, observed = (by_row(each) for each in (low, high, observed))
        counted = None
    outside = (low - observed).clamp_min(0.0) + (observed - high).clamp_min(0.0)
    return row_means(high - low + 2 / (1 - level) * outside, counted)


def energy_score(prediction: Prediction | Array, y: Array, *, draws: int = 256, seed: int = 0) -> float:
    r"""Energy score, the CRPS of all outputs of a row together: it sees whether their correlations are right.

    .. math:: E\lVert X - y \rVert - \tfrac12 E\lVert X - X' \rVert

    (Gneiting and Raftery, 2007), without bias from K draws: the second mean is over the K (K - 1) pairs of different
    ones.

    Args:
        prediction: A Prediction over numbers, or samples of the outcome ``(K, B, ...)``, two or more.
        y: Observed numbers, ``(B, ...)``.
        draws: How many outcomes of a Prediction are drawn.
        seed: Fixes them.

    Returns:
        The mean over rows, in the unit of the outcome; lower is better. It may be below zero by chance.

    Example:
        >>> energy_score([[[0.0, 0.0]], [[3.0, 4.0]]], [[0.0, 0.0]])  # (0 + 5) / 2 - 5 / 2
        0.0
    """
    return energy_score_rows(prediction, y, draws=draws, seed=seed).mean().item()


@torch.no_grad()
def energy_score_rows(prediction: Prediction | Array, y: Array, *, draws: int = 256, seed: int = 0) -> Tensor:
    """Energy score of each row, ``(B,)``; see :func:`energy_score`."""
    if isinstance(prediction, Prediction):
        draws = check_count("draws", draws, at_least=2)
        numbers = regression(prediction, "energy_score")
        _, observed, counted = means_and_target(numbers, y)
        if counted is not None and not counted.all():
            raise InvalidData("energy_score needs all outputs of a row, and y has missing ones. Drop these rows.")
        device = numbers.components.mean.device
        samples = in_double(numbers.draw(draws, generator=generator_for(seed, "energy score", device=device)))
    else:
        samples = check_rows("prediction", score_tensor("prediction", prediction)).double()
        if samples.dim() < 2 or len(samples) < 2:
            raise InvalidData(
                f"prediction must hold samples of shape (K, B, ...), two or more for each of B rows; got shape "
                f"{tuple(samples.shape)}."
            )
        check_finite_target(samples.movedim(0, -1), name="prediction")
        observed = align_target(target(y, samples.shape[1], device=samples.device), samples.shape[2:]).double()
    samples, observed = samples.flatten(2).movedim(0, 1), by_row(observed)  # (B, K, E), (B, E)
    if samples.dim() == 2:
        samples = samples.unsqueeze(2)
    count = samples.shape[1]
    rows = max(1, _VALUES_AT_ONCE // (count * max(count, samples.shape[2])))
    found = []
    for some, own in zip(samples.split(rows), observed.split(rows), strict=True):
        near = (some - own.unsqueeze(1)).norm(dim=2).mean(1)
        apart = torch.cdist(some, some, compute_mode="donot_use_mm_for_euclid_dist").sum((1, 2))
        found.append(near - apart / (2 * count * (count - 1)))
    return torch.cat(found)


@dataclass(frozen=True)
class BrierDecomposition:
    """The parts of the Brier score, of which it is exactly ``reliability - resolution + uncertainty + within``.

    Attributes:
        reliability: How far frequencies are from probabilities, in bins of probability; 0 is calibrated.
        resolution: How much frequencies differ between bins; more is better.
        uncertainty: The score of always saying how frequent each class is: what the labels alone are like.
        within: What differs within bins (Stephenson et al., 2008): the variance of probabilities less twice their
            covariance with outcomes. 0 where all probabilities of a bin are the same; below 0 where bins are coarse.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within: float

    @property
    def score(self) -> float:
        """The Brier score."""
        return self.reliability - self.resolution + self.uncertainty + self.within


@torch.no_grad()
def brier_decomposition(
    prediction: Prediction | Array, y: Array, *, bins: int = 10, binning: str = "width"
) -> BrierDecomposition:
    r"""Murphy's (1973) decomposition of the Brier score, summed over classes, each against all others.

    .. math:: \sum_b \frac{n_b}{n} (\bar p_b - \bar y_b)^2 - \sum_b \frac{n_b}{n} (\bar y_b - \bar y)^2
        + \bar y (1 - \bar y) + \mathrm{within}

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        bins: Number of bins of the probability of each class.
        binning: Bins of equal ``"width"`` or equal ``"mass"``.

    Returns:
        The parts.
    """
    bins = check_count("bins", bins)
    probs, hits = _each_class(prediction, y)
    parts = torch.stack([_parts(p, hit, bins, binning) for p, hit in zip(probs, hits, strict=True)]).sum(0)
    return BrierDecomposition(*parts.tolist())


def _parts(p: Tensor, hit: Tensor, bins: int, binning: str) -> Tensor:
    edges = _edges(p, bins, binning)
    index = torch.bucketize(p, edges[1:-1])
    count = torch.bincount(index).double()
    middle, share = (torch.bincount(index, each) / count for each in (p, hit))
    weights, mean = torch.nan_to_num(count / len(p)), hit.mean()
    reliability = (weights * torch.nan_to_num(middle - share).square()).sum()
    resolution = (weights * torch.nan_to_num(share - mean).square()).sum()
    distance = p - middle[index]
    within = (distance.square() - 2 * distance * (hit - share[index])).mean()
    return torch.stack([reliability, resolution, mean * (1 - mean), within])
