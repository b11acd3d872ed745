"""Calibration of whole distributions of numbers: the probability integral transform, and how sharp they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import generator_for
from knowable.evaluation.calibration import _transform
from knowable.evaluation.inputs import Array, by_row, in_double, regression


@dataclass(frozen=True)
class PITHistogram:
    """How often outcomes fall into each part of their predictive distribution.

    Attributes:
        edges: Edges of the bins of predictive probability, from 0 to 1, ``(bins + 1,)``.
        share: Share of outcomes in each bin, ``(bins,)``; 1 / bins each where predictions are calibrated.
        standard_error: Standard error of a calibrated share with so many outcomes.
    """

    edges: Tensor
    share: Tensor
    standard_error: float


@torch.no_grad()
def pit_values(prediction: Prediction, y: Array, *, seed: int = 0) -> Tensor:
    """The probability integral transform of each outcome, the predicted probability of a smaller one.

    They are uniform between 0 and 1 where the predictive distribution is right (Dawid, 1984). Of counts a random point
    of the jump of the distribution function is taken (Czado et al., 2009).

    Args:
        prediction: A Prediction over numbers.
        y: Observed numbers.
        seed: Fixes the random points.

    Returns:
        The values of all outcomes that count, ``(N,)``.
    """
    below, above, counted = _transform(regression(prediction, "pit_values"), y)
    share = torch.rand(above.shape, generator=generator_for(seed, "pit"), dtype=torch.float64).to(above.device)
    found = below + share * (above - below)
    return (found.flatten() if counted is None else found[counted]).cpu()


@torch.no_grad()
def pit_histogram(prediction: Prediction, y: Array, *, bins: int = 10) -> PITHistogram:
    """The histogram of the probability integral transform; flat for calibrated predictions.

    A hill in the middle: predictions are not sure enough. Heaps at both ends: too sure. A slope: too low or too high.
    A count contributes to every bin the share of its jump that lies there, without randomness (Czado et al., 2009).

    Args:
        prediction: A Prediction over numbers.
        y: Observed numbers.
        bins: Number of bins of equal width.

    Returns:
        The histogram.
    """
    bins = check_count("bins", bins)
    below, above, counted = _transform(regression(prediction, "pit_histogram"), y)
    below, above = (each.flatten() if counted is None else each[counted] for each in (below, above))
    edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=above.device)
    jump = above > below
    inside = (above[jump, None].clamp_max(edges[1:]) - below[jump, None].clamp_min(edges[:-1])).clamp_min(0.0)
    share = (inside / (above - below)[jump, None]).sum(0)
    share += torch.bincount(torch.bucketize(above[~jump], edges[1:-1]), minlength=bins)
    error = (1 / bins * (1 - 1 / bins) / len(above)) ** 0.5
    return PITHistogram(edges.cpu(), (share / len(above)).cpu(), error)


@torch.no_grad()
def quantile_calibration_error(prediction: Prediction, y: Array, *, levels: int = 19) -> float:
    r"""Root mean square distance of observed from promised shares of outcomes below a quantile.

    .. math:: \sqrt{\frac1L \sum_l \Big(\frac1N \sum_n P(F_n(y_n) \le p_l) - p_l\Big)^2}

    after Kuleshov, Fenner and Ermon (2018), whose weights are all one here. Unlike :func:`ece` of numbers, which sees
    central intervals, it also sees predictions that are all too low. A count's share of a level is that of its jump.

    Args:
        prediction: A Prediction over numbers.
        y: Observed numbers.
        levels: Number of levels p, spread evenly over (0, 1).

    Returns:
        The error, between 0 and 1; lower is better.
    """
    count = check_count("levels", levels)
    below, above, counted = _transform(regression(prediction, "quantile_calibration_error"), y)
    below, above = (each.flatten() if counted is None else each[counted] for each in (below, above))
    at = torch.arange(1, count + 1, dtype=torch.float64, device=above.device) / (count + 1)
    jump = (above - below).unsqueeze(1)
    share = torch.where(
        jump > 0,
        ((at - below.unsqueeze(1)) / jump.clamp_min(1e-300)).clamp(0.0, 1.0),
        (above.unsqueeze(1) <= at).double(),
    )
    return (share.mean(0) - at).square().mean().sqrt().item()


@torch.no_grad()
def sharpness(prediction: Prediction) -> float:
    """Root mean square of the predictive standard deviations: how narrow predictions are, whatever was observed.

    Among calibrated predictions the sharper are the better (Gneiting, Balabdaoui and Raftery, 2007).

    Args:
        prediction: A Prediction over numbers.

    Returns:
        The spread, in the unit of the outcome; lower is sharper.
    """
    return by_row(in_double(regression(prediction, "sharpness").variance)).mean().sqrt().item()
