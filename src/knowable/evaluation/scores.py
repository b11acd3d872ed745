"""Scores of predictions against observed outcomes.

Each score has a ``*_rows`` function with one value for each row, for standard errors and paired comparisons, and a
function that gives their mean as a float. With several outputs or pixels in a row, each counts as one prediction; only
the log density is joint, as in :meth:`Prediction.log_prob`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction, RegressionPrediction, align_target, check_finite_target
from knowable.errors import InvalidData
from knowable.evaluation.inputs import (
    Array,
    by_row,
    cdf,
    check_rows,
    classes_and_target,
    in_double,
    means_and_target,
    regression,
    row_means,
    score_tensor,
    target,
)
from knowable.evaluation.ranked_probability import continuous_crps, count_crps, normal_mixture_crps, sample_crps


def nll(prediction: Prediction | Array, y: Array) -> float:
    r"""Mean negative log predictive density (or probability) of the rows, in nats: :math:`-\frac1B \sum_b \log p(y_b)`.

    Args:
        prediction: A Prediction; or class probabilities ``(B, C, ...)``, or P(y=1), scored as independent.
        y: Observed outcomes: numbers, counts or labels.

    Returns:
        The score; lower is better, infinite if an outcome had predictive probability 0.

    Example:
        >>> nll(torch.tensor([[0.5, 0.5], [0.1, 0.9]]), [0, 1])  # (log 2 - log 0.9) / 2
        0.399...
    """
    return nll_rows(prediction, y).mean().item()


@torch.no_grad()
def nll_rows(prediction: Prediction | Array, y: Array) -> Tensor:
    """Negative log predictive density of each row, ``(B,)``; see :func:`nll`."""
    if isinstance(prediction, RegressionPrediction):
        _, observed, counted = means_and_target(prediction, y)
        mean = prediction.mean
        observed = observed if counted is None else observed.where(counted, torch.nan)
        found = -in_double(prediction.log_prob(observed.view(mean.shape).to(mean.dtype)))
        return found if counted is None else found[counted.any(1)]
    table, labels, counted = classes_and_target(prediction, y)
    if isinstance(prediction, Prediction):
        if counted is not None:
            return -in_double(prediction.log_prob(score_tensor("y", y)))[counted.any(1)]
        return -in_double(prediction.log_prob(labels.view(table.shape)))
    return -table.probs.gather(-1, labels.unsqueeze(-1)).squeeze(-1).log().sum(1)


def rmse(prediction: Prediction | Array, y: Array) -> float:
    """Root mean squared error of the predicted means.

    Args:
        prediction: A Prediction over numbers, or the means themselves.
        y: Observed numbers. A vector and a column are the same thing.

    Returns:
        The score, in the unit of ``y``; lower is better.

    Example:
        >>> rmse(torch.tensor([[1.0], [2.0]]), [1.0, 4.0])
        1.414...
    """
    return squared_error_rows(prediction, y).mean().sqrt().item()


@torch.no_grad()
def squared_error_rows(prediction: Prediction | Array, y: Array) -> Tensor:
    """Squared error of each row, averaged over its outputs, ``(B,)``."""
    mean, observed, counted = means_and_target(prediction, y)
    return row_means((mean - observed).square(), counted)


def crps(prediction: Prediction | Array, y: Array) -> float:
    r"""Continuous ranked probability score, :math:`\int (F(x) - 1\{x \ge y\})^2\,dx`, mean over rows and outputs.

    Exact for mixtures of normals (Grimit et al., 2006), for mixtures over counts whose range is moderate, and for
    samples (whose empirical distribution is scored). For other predictions an adaptive integral, with an error below
    1e-4 of the predictive standard deviation (or of the residual, if that is larger); it reaches 1e-3 only where the
    mixed distributions are hundreds of times narrower than the distances between them.

    Args:
        prediction: A Prediction over numbers, or equally weighted samples of the outcome ``(K, B, ...)``.
        y: Observed numbers, ``(B, ...)``.

    Returns:
        The score, in the unit of ``y``; lower is better. The absolute error, if the prediction is a single point.

    Example:
        >>> crps(torch.tensor([[0.0], [2.0]]), [1.0])  # E|X - y| - E|X - X'| / 2 = 1 - 1/2
        0.5
    """
    return crps_rows(prediction, y).mean().item()


@torch.no_grad()
def crps_rows(prediction: Prediction | Array, y: Array) -> Tensor:
    """CRPS of each row, averaged over its outputs, ``(B,)``; see :func:`crps`."""
    if isinstance(prediction, Prediction):
        return row_means(*_prediction_crps(regression(prediction, "crps"), y))
    samples = check_rows("prediction", score_tensor("prediction", prediction)).double()
    if samples.dim() < 2:
        raise InvalidData(
            f"prediction must hold samples of shape (K, B, ...), K for each of B rows; got shape "
            f"{tuple(samples.shape)}. For one forecast a row pass prediction[None]: its score is the absolute error."
        )
    check_finite_target(samples.movedim(0, -1), name="prediction")
    observed = align_target(target(y, samples.shape[1], device=samples.device), samples.shape[2:]).double()
    return by_row(sample_crps(samples, observed)).mean(1)


def _prediction_crps(prediction: RegressionPrediction, y: Array) -> tuple[Tensor, Tensor | None]:
    """The score of each outcome, and which of them count, ``(B, E)``."""
    mean, observed, counted = means_and_target(prediction, y)
    shape = prediction.mean.shape
    return by_row(_crps_of(prediction, mean.view(shape), observed.view(shape))), counted


def _crps_of(prediction: RegressionPrediction, mean: Tensor, observed: Tensor) -> Tensor:
    if prediction.components.discrete:
        _check_counts(observed)
    elif _is_normal_mixture(prediction):
        loc, variance = in_double(prediction.components.mean), in_double(prediction.components.variance)
        return normal_mixture_crps(loc, variance.sqrt(), in_double(prediction.log_weights), observed)
    std = _finite_spread(prediction)
    scale = (std.square() + (mean - observed).square()).sqrt().clamp_min(torch.finfo(std.dtype).tiny)
    if prediction.components.discrete:
        return count_crps(partial(cdf, prediction), observed, mean, std, scale)
    return continuous_crps(partial(cdf, prediction), observed, scale)


def _is_normal_mixture(prediction: RegressionPrediction) -> bool:
    """Whether the components are normal, by their CDFs at a few points (all components are of one family)."""
    parts = prediction.components
    mean, std = parts.mean, parts.variance.sqrt()
    points = [mean[k] + z * std[k] for k in (0, -1) for z in (-2.5, -0.7, 1.5)]
    return all(
        torch.allclose(parts.cdf(x), torch.special.ndtr((x - mean) / std), rtol=0.0, atol=1e-5, equal_nan=True)
        for x in points
    )


def _finite_spread(prediction: RegressionPrediction) -> Tensor:
    """The standard deviation, or where it is infinite the interquartile range."""
    std = in_double(prediction.std)
    if torch.isfinite(std).all():
        return std
    quartiles = in_double(prediction.quantile(0.75) - prediction.quantile(0.25))
    return torch.where(torch.isfinite(std), std, quartiles)


def _check_counts(y: Tensor) -> None:
    bad = (y < 0) | (y != y.round())
    if bad.any():
        row = int(torch.nonzero(by_row(bad).any(1))[0])
        raise InvalidData(
            f"y must hold counts, because the prediction is over counts; got {y[bad][0].item():g} in row {row} "
            f"(counting from 0). Round y, or use a likelihood for real numbers."
        )


def accuracy(prediction: Prediction | Array, y: Array) -> float:
    """Share of labels predicted right; every pixel or output counts as one.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.

    Returns:
        The share; higher is better.

    Example:
        >>> accuracy(torch.tensor([0.2, 0.9, 0.6, 0.4]), [0, 1, 0, 0])  # P(y=1)
        0.75
    """
    return accuracy_rows(prediction, y).mean().item()


@torch.no_grad()
def accuracy_rows(prediction: Prediction | Array, y: Array) -> Tensor:
    """Share of right labels in each row, ``(B,)``."""
    table, observed, counted = classes_and_target(prediction, y)
    return row_means((table.labels == observed).double(), counted)


def brier(prediction: Prediction | Array, y: Array) -> float:
    r"""Brier score, the squared error of the probabilities summed over classes (Brier, 1950).

    .. math:: \frac1N \sum_n \sum_c (p_{nc} - 1\{y_n = c\})^2

    It lies between 0 and 2. A binary prediction given as P(y=1) is scored as its two classes, so that both ways of
    writing it agree: twice :math:`(p - y)^2`.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.

    Returns:
        The score; lower is better.

    Example:
        >>> brier([[0.75, 0.25]], [0]), brier([0.25], [0])
        (0.125, 0.125)
    """
    return brier_rows(prediction, y).mean().item()


@torch.no_grad()
def brier_rows(prediction: Prediction | Array, y: Array) -> Tensor:
    """Brier score of each row, averaged over its pixels or outputs, ``(B,)``."""
    table, observed, counted = classes_and_target(prediction, y)
    truth = torch.nn.functional.one_hot(observed, table.probs.shape[-1])
    return row_means((table.probs - truth).square().sum(-1), counted)
