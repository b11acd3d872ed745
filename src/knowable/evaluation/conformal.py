r"""Conformal prediction: intervals and sets of labels that hold the outcome with a promised probability.

A score says how far an outcome is from its prediction. The threshold is a quantile of the scores of n held-out rows,
with a correction for their number; whatever a new row's score keeps below it belongs to its interval or set:

.. math:: P(Y \in C(X)) \ge 1 - \alpha

for any model and any distribution, if held-out and new rows are exchangeable (Vovk et al., 2005). The probability is
over held-out and new rows together.

Everything takes plain tensors or arrays, so predictions from elsewhere do as well: class probabilities, a mean, a mean
with a standard deviation, two quantiles. Of draws, take these first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction, RegressionPrediction, align_target, check_finite_target
from knowable.core.support.checks import check_choice, check_number
from knowable.errors import InvalidArgument, InvalidData
from knowable.evaluation.inputs import (
    Array,
    by_row,
    check_rows,
    class_table,
    classes_and_target,
    in_double,
    score_tensor,
    target,
)
from knowable.evaluation.risk_control import (
    RejectionRule,
    RiskControl,
    control_risk,
    missed_shares,
    outside_shares,
    rejection_rule,
    risk_bound,
    risk_p_value,
)

__all__ = [
    # thresholds
    "threshold",
    "group_thresholds",
    "rows_needed",
    "p_values",
    # numbers
    "prediction_intervals",
    "split_scores",
    "normalised_scores",
    "cqr_scores",
    # classes
    "prediction_sets",
    "lac_scores",
    "aps_scores",
    "raps_scores",
    # risk control
    "control_risk",
    "RiskControl",
    "missed_shares",
    "outside_shares",
    "rejection_rule",
    "RejectionRule",
    "risk_p_value",
    "risk_bound",
]

CLASS_SCORES = ("lac", "aps", "raps")
NUMBER_SCORES = ("split", "normalised", "cqr")
_MOST_DENOMINATOR = 10**9  # alpha as the fraction that was meant: 1 - 0.9 is 1/10


def as_fraction(alpha: float) -> Fraction:
    """``alpha`` checked, and as the fraction that was meant by it."""
    alpha = check_number("alpha", alpha, above=0.0, below=1.0)
    return Fraction(alpha).limit_denominator(_MOST_DENOMINATOR) or Fraction(alpha)


def rows_needed(alpha: float) -> int:
    """Least number of held-out rows with which a threshold at level ``alpha`` is finite: 1/alpha - 1, rounded up."""
    return math.ceil(1 / as_fraction(alpha)) - 1


@torch.no_grad()
def threshold(scores: Array, alpha: float, *, where: str = "") -> float:
    r"""The conformal threshold: the :math:`\lceil (n + 1)(1 - \alpha) \rceil`-th smallest of n held-out scores.

    Rows with several outputs or pixels, scores ``(n, E)``, get the smallest threshold of which conformal risk control
    (Angelopoulos et al., 2022) says that the expected share of a row's outputs above it is at most ``alpha``:

    .. math:: \frac{1}{n + 1}\Big(1 + \sum_i \frac{1}{E} \sum_e 1[s_{ie} > q]\Big) \le \alpha

    which for one output is the same.

    Args:
        scores: Scores of held-out rows, ``(n,)`` or ``(n, ...)``; NaN where no outcome counts.
        alpha: Share of new rows (or of their outputs) that may be above it.
        where: What messages call the rows, such as a group.

    Raises:
        InvalidData: With fewer than ``ceil(1/alpha) - 1`` rows, for which no threshold is finite.
    """
    level = as_fraction(alpha)
    values = by_row(check_rows("scores", score_tensor("scores", scores)).double())
    known = ~values.isnan()
    values, known = values[known.any(1)], known[known.any(1)]
    n, outputs = values.shape
    if n < rows_needed(alpha):
        raise InvalidData(
            f"A threshold at alpha={float(level):g} needs at least {rows_needed(alpha):,} held-out rows, got {n:,}"
            f"{where}. Hold out more rows, or raise alpha."
        )
    spare = (n + 1) * level - 1  # rows that may be above
    if known.all():
        ordered = values.flatten().sort(descending=True).values
        return ordered[math.floor(outputs * spare)].item()
    weights = (known / known.sum(1, keepdim=True))[known]
    ordered, order = values[known].sort(descending=True)
    above = weights[order].cumsum(0)  # if the threshold is below this one
    return ordered[int((above <= float(spare) + 1e-12).sum())].item()


def group_thresholds(scores: Array, alpha: float, groups: Array | Sequence[Any]) -> dict[Any, float]:
    """A threshold for each group of rows (Mondrian), so that each group has its own guarantee.

    Args:
        scores: Scores of held-out rows, ``(n,)`` or ``(n, ...)``.
        alpha: Share of the new rows of each group that may be above its threshold.
        groups: The group of each row: numbers or texts. With the labels themselves as groups, the guarantee is for each
            class.

    Raises:
        InvalidData: If a group has too few rows, naming it.
    """
    values = check_rows("scores", score_tensor("scores", scores)).double()
    names = check_groups(groups, len(values))
    found: dict[Any, float] = {}
    for name in sorted(set(names)):
        rows = torch.tensor([each == name for each in names], device=values.device)
        found[name] = threshold(values[rows], alpha, where=f" in group {name!r}")
    return found


def check_groups(groups: Array | Sequence[Any], rows: int) -> list[Any]:
    """The group of each row as plain values."""
    names = np.asarray(groups.detach().cpu() if isinstance(groups, Tensor) else groups)
    if names.shape != (rows,):
        raise InvalidData(f"groups must have one entry for each of {rows} rows, got shape {names.shape}.")
    if names.dtype.kind not in "biuSUO" and not (names.dtype.kind == "f" and (names == names.round()).all()):
        raise InvalidData(f"groups must be whole numbers or texts, got {names.dtype}.")
    return [int(each) if isinstance(each, bool | int | float) else str(each) for each in names.tolist()]


def thresholds_of(found: dict[Any, float], groups: Array | Sequence[Any], rows: int) -> Tensor:
    """The threshold of each row by its group, ``(rows,)``."""
    names = check_groups(groups, rows)
    unknown = next((place for place, name in enumerate(names) if name not in found), None)
    if unknown is not None:
        raise InvalidData(
            f"Row {unknown} (counting from 0) is of group {names[unknown]!r}, which had no held-out rows. Groups with "
            f"a threshold: {', '.join(map(repr, found))}."
        )
    return torch.tensor([found[name] for name in names], dtype=torch.float64)


@torch.no_grad()
def p_values(held_out: Array, new: Array) -> Tensor:
    r"""Conformal p-values: how usual a score is among those of held-out rows.

    .. math:: p(s) = \frac{1 + \#\{i : s_i \ge s\}}{n + 1}

    For a new row that is exchangeable with the held-out ones, :math:`P(p \le \alpha) \le \alpha`: an alarm at p of at
    most ``alpha`` is false with at most that probability.

    Args:
        held_out: Scores of held-out rows, ``(n,)``; larger is stranger.
        new: Scores of new rows, ``(m,)``.

    Returns:
        ``(m,)``.
    """
    known = check_rows("held_out", score_tensor("held_out", held_out)).double().flatten()
    asked = score_tensor("new", new).double().to(known.device)
    for name, values in (("held_out", known), ("new", asked)):
        if values.isnan().any():
            raise InvalidData(f"{name} has missing values. Drop or fill them.")
    at_least = len(known) - torch.searchsorted(known.sort().values, asked.contiguous())
    return (1 + at_least).double() / (len(known) + 1)


# --- numbers ----------------------------------------------------------------------------------------------------------


def split_scores(mean: Array, y: Array) -> Tensor:
    """Absolute residuals: intervals of the same width everywhere (Papadopoulos et al., 2002; Lei et al., 2018)."""
    return (_aligned(y, mean) - score_tensor("mean", mean)).double().abs()


def normalised_scores(mean: Array, std: Array, y: Array) -> Tensor:
    """Residuals in units of the predicted standard deviation: wide where the model is uncertain (Lei et al., 2018)."""
    scale = score_tensor("std", std).double()
    if not (scale > 0).all() or not scale.isfinite().all():
        raise InvalidData("std must be positive and finite for normalised scores. Use split or cqr scores instead.")
    return split_scores(mean, y) / scale


def cqr_scores(low: Array, high: Array, y: Array) -> Tensor:
    """Distance outside two quantiles, negative inside: conformalised quantile regression (Romano et al., 2019)."""
    observed = _aligned(y, low).double()
    return torch.maximum(score_tensor("low", low) - observed, observed - score_tensor("high", high)).double()


def _aligned(y: Array, like: Array) -> Tensor:
    shape = score_tensor("prediction", like)
    return align_target(score_tensor("y", y).to(shape.device), shape.shape[1:])


Numbers = RegressionPrediction | Array | tuple[Array, Array]


def number_scores(prediction: Numbers, y: Array, score: str, alpha: float) -> Tensor:
    """The scores of held-out rows, in the shape of the predictions; NaN where an outcome is missing."""
    first, second = number_parts(prediction, score, alpha)
    missing = isinstance(prediction, RegressionPrediction) and prediction.missing
    observed = align_target(target(y, len(first), device=first.device, missing=missing), first.shape[1:])
    if score == "split":
        return split_scores(first, observed)
    return (normalised_scores if score == "normalised" else cqr_scores)(first, second, observed)


def number_interval(prediction: Numbers, q: Tensor | float, score: str, alpha: float) -> tuple[Tensor, Tensor]:
    """The interval of all numbers whose score is at most q (of each row, ``(rows,)``, or one for all)."""
    first, second = number_parts(prediction, score, alpha)
    limit = torch.as_tensor(q, dtype=torch.float64, device=first.device)
    limit = limit.view(-1, *(1,) * (first.dim() - 1)) if limit.dim() else limit
    if score == "cqr":
        low, high = first - limit, second + limit
        middle = (low + high) / 2  # a negative threshold may turn a narrow interval around: then one point is left
        return torch.minimum(low, middle), torch.maximum(high, middle)
    half = limit * second if score == "normalised" else limit
    return first - half, first + half


def number_parts(prediction: Numbers, score: str, alpha: float) -> tuple[Tensor, Tensor]:
    """What a score is made of, in double precision: mean and standard deviation, or two quantiles."""
    if isinstance(prediction, RegressionPrediction):
        if score == "cqr":
            return in_double(prediction.quantile(alpha / 2)), in_double(prediction.quantile(1 - alpha / 2))
        mean = in_double(prediction.mean)
        return mean, in_double(prediction.std) if score == "normalised" else mean
    if isinstance(prediction, Prediction):
        raise InvalidArgument(f"score={score!r} is for numbers. For classes there are {', '.join(CLASS_SCORES)}.")
    parts = prediction if isinstance(prediction, tuple) else (prediction, prediction)
    if len(parts) != 2 or (score != "split" and not isinstance(prediction, tuple)):
        pair = "(mean, std)" if score == "normalised" else "(low, high)"
        raise InvalidArgument(f"prediction must be a pair of arrays {pair} for score={score!r}.")
    first, second = (check_rows("prediction", score_tensor("prediction", each)).double() for each in parts)
    check_finite_target(first, name="prediction")
    if first.shape != second.shape:
        raise InvalidData(f"prediction has arrays of shapes {tuple(first.shape)} and {tuple(second.shape)}.")
    return first, check_finite_target(second, name="prediction")


@torch.no_grad()
def prediction_intervals(
    held_out: Numbers,
    y: Array,
    new: Numbers,
    alpha: float = 0.1,
    *,
    score: str = "split",
    groups: Array | Sequence[Any] | None = None,
    new_groups: Array | Sequence[Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Intervals that hold the outcomes of new rows with probability ``1 - alpha``.

    Args:
        held_out: Predictions of held-out rows: a Prediction, an array of means (``"split"``), a pair ``(mean, std)``
            (``"normalised"``), or a pair of quantiles ``(low, high)`` (``"cqr"``).
        y: Their outcomes.
        new: Predictions of new rows, of the same kind.
        alpha: Share of outcomes that may be outside; with several outputs, the share of a row's outputs, on average.
        score: ``"split"``: the same width everywhere. ``"normalised"``: wide where the standard deviation is large.
            ``"cqr"``: the quantiles, moved outwards or inwards.
        groups: The group of each held-out row; then the guarantee is for each group.
        new_groups: The groups of the new rows.

    Returns:
        Lower and upper ends, each in the shape of the predictions.

    Example:
        >>> low, high = prediction_intervals([0.0] * 9, [1, -2, 3, 4, 5, 6, 7, 8, 9], [10.0], alpha=0.1)
        >>> low.item(), high.item()
        (1.0, 19.0)
    """
    check_choice("score", score, NUMBER_SCORES)
    scores = number_scores(held_out, y, score, alpha)
    if groups is None:
        return number_interval(new, threshold(scores, alpha), score, alpha)
    rows = len(number_parts(new, score, alpha)[0])
    q = thresholds_of(group_thresholds(scores, alpha, groups), _both_groups(new_groups), rows)
    return number_interval(new, q, score, alpha)


def _both_groups(new_groups: Any) -> Any:
    if new_groups is None:
        raise InvalidArgument("new_groups must be given where groups are: the thresholds differ from group to group.")
    return new_groups


# --- classes: the scores of all labels, the last dimension running over classes ---------------------------------------


def lac_scores(probs: Array) -> Tensor:
    """One minus the probability of each label: least ambiguous sets (Sadinle et al., 2019), also known as THR.

    The smallest sets on average. A set is empty where no label is usual.
    """
    return 1 - _probabilities(probs)


def aps_scores(probs: Array, uniform: Array | None = None) -> Tensor:
    r"""The probability of all labels that are likelier than a label, and its own: adaptive sets (Romano et al., 2020).

    .. math:: s(x, y) = \sum_{j : p_j > p_y} p_j + u\, p_y

    with u = 1, or random between 0 and 1, which makes the coverage exact and the sets smaller.

    Args:
        probs: ``(..., classes)``.
        uniform: u, a number between 0 and 1 for each row, ``(...,)``; None: 1.
    """
    return _adaptive(_probabilities(probs), uniform)[0]


def raps_scores(probs: Array, uniform: Array | None = None, *, penalty: float = 0.01, free: int = 1) -> Tensor:
    r"""Regularised adaptive sets (Angelopoulos et al., 2021): :func:`aps_scores` and a penalty on every label beyond.

    .. math:: s_{APS}(x, y) + \lambda \max(\mathrm{rank}(y) - k, 0)

    Args:
        probs: ``(..., classes)``.
        uniform: As in :func:`aps_scores`.
        penalty: λ.
        free: k, how many labels are without penalty.
    """
    check_number("penalty", penalty, at_least=0.0)
    scores, rank = _adaptive(_probabilities(probs), uniform)
    return scores + penalty * (rank - free).clamp_min(0).double()


def _adaptive(probs: Tensor, uniform: Array | None) -> tuple[Tensor, Tensor]:
    """APS scores, and ranks counted from 1; equal probabilities in the order of the classes."""
    u = torch.ones(()) if uniform is None else score_tensor("uniform", uniform).double().unsqueeze(-1)
    if not ((u >= 0) & (u <= 1)).all():
        raise InvalidData("uniform must lie between 0 and 1.")
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    through = ordered.cumsum(-1)
    scores = through - (1 - u.to(probs.device)) * ordered
    ranks = torch.arange(1, probs.shape[-1] + 1, device=probs.device).expand_as(order)
    return torch.empty_like(probs).scatter_(-1, order, scores), torch.empty_like(order).scatter_(-1, order, ranks)


def _probabilities(probs: Array) -> Tensor:
    values = check_rows("probs", score_tensor("probs", probs)).double()
    check_finite_target(values, name="probs")
    if values.min() < -1e-6 or ((values.sum(-1) - 1).abs() > 1e-3).any():
        raise InvalidData(
            f"probs must hold probabilities that sum to one over the last dimension, got sums from "
            f"{values.sum(-1).min():.4g} to {values.sum(-1).max():.4g}. Apply softmax to logits."
        )
    return values


def label_scores(probs: Tensor, score: str, uniform: Tensor | None) -> Tensor:
    """The scores of all labels by name."""
    if score == "lac":
        return lac_scores(probs)
    return (aps_scores if score == "aps" else raps_scores)(probs, uniform)


def scores_of(scores: Tensor, y: Tensor, counted: Tensor | None) -> Tensor:
    """The scores of the observed labels, ``(B, E)``; NaN where a label does not count."""
    own = scores.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return own if counted is None else own.where(counted, torch.nan)


@torch.no_grad()
def prediction_sets(
    held_out: Prediction | Array,
    y: Array,
    new: Prediction | Array,
    alpha: float = 0.1,
    *,
    score: str = "lac",
    seed: int | None = None,
    groups: Array | Sequence[Any] | str | None = None,
    new_groups: Array | Sequence[Any] | None = None,
) -> Tensor:
    """Sets of labels that hold the labels of new rows with probability ``1 - alpha``.

    Args:
        held_out: Predictions of held-out rows: a Prediction over classes, probabilities ``(n, classes)``, or P(y=1).
        y: Their labels.
        new: Predictions of new rows.
        alpha: Share of labels that may be outside; with several outputs or pixels, the share of a row's.
        score: ``"lac"``: the smallest sets. ``"aps"``: sets that grow where the model is unsure. ``"raps"``: these,
            with a penalty on large ones.
        seed: Randomises ``"aps"`` and ``"raps"``: the same seed and number of rows give the same sets. None: not
            random.
        groups: The group of each held-out row, or ``"label"``; then the guarantee is for each group or class.
        new_groups: The groups of the new rows, but for ``"label"``.

    Returns:
        Booleans ``(rows, classes)``, or ``(rows, classes, ...)`` with several outputs or pixels.

    Example:
        >>> held_out = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]
        >>> prediction_sets(held_out, [0, 0, 1, 1], [[0.95, 0.05], [0.5, 0.5]], alpha=0.2)
        tensor([[ True, False],
                [ True,  True]])
    """
    check_choice("score", score, CLASS_SCORES)
    table, observed, counted = classes_and_target(held_out, y)
    asked = class_table(new, name="new")
    if asked.probs.shape[1:] != table.probs.shape[1:]:
        raise InvalidData(
            f"new must have the outputs and classes of held_out, {tuple(table.probs.shape[1:])}, got "
            f"{tuple(asked.probs.shape[1:])}."
        )
    first, second = _uniforms(seed, table.probs.shape[:2], asked.probs.shape[:2])
    own = scores_of(label_scores(table.probs, score, first), observed, counted)
    scores = label_scores(asked.probs, score, second)
    if isinstance(groups, str):
        q = class_thresholds(own, alpha, observed, table.probs.shape[-1], groups)
    elif groups is not None:
        q = thresholds_of(group_thresholds(own, alpha, groups), _both_groups(new_groups), len(scores)).view(-1, 1, 1)
    else:
        q = threshold(own, alpha)
    return in_class_order(scores <= q, asked.shape)


def _uniforms(seed: int | None, *shapes: torch.Size) -> list[Tensor | None]:
    if seed is None:
        return [None for _ in shapes]
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def class_thresholds(own: Tensor, alpha: float, y: Tensor, classes: int, groups: str) -> Tensor:
    """The threshold of each class, ``(classes,)``."""
    check_choice("groups", groups, ("label",))
    if own.shape[1] > 1:
        raise InvalidArgument("groups='label' is for one label a row, not for several outputs or pixels.")
    found = group_thresholds(own[:, 0], alpha, y[:, 0])
    missing = [each for each in range(classes) if each not in found]
    if missing:
        raise InvalidData(
            f"Class {missing[0]} has no held-out rows, and groups='label' needs at least {rows_needed(alpha)} of each."
        )
    return torch.tensor([found[each] for each in range(classes)], dtype=torch.float64, device=own.device)


def in_class_order(sets: Tensor, shape: torch.Size) -> Tensor:
    """``(B, E, C)`` to ``(B, C, ...)``, ``shape`` being that of the labels."""
    trailing = tuple(shape[1:])
    if trailing in ((), (1,)):
        return sets[:, 0]
    return sets.reshape(*shape, sets.shape[-1]).movedim(-1, 1)
