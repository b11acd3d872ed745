"""Agreement of two predictions over classes, one often a reference such as HMC (Izmailov et al., 2021)."""

from __future__ import annotations

import torch

from knowable.core.prediction.prediction import Prediction
from knowable.errors import InvalidData
from knowable.evaluation.inputs import Array, ClassTable, class_table


@torch.no_grad()
def agreement(p: Prediction | Array, q: Prediction | Array) -> float:
    """Share of rows (and pixels or outputs) where the most probable labels are the same.

    Args:
        p: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1) as ``(B,)`` or ``(B, 1)``.
        q: The other, at the same inputs.

    Returns:
        The share, between 0 and 1.

    Example:
        >>> agreement([[0.9, 0.1], [0.4, 0.6]], [[0.6, 0.4], [0.7, 0.3]])
        0.5
    """
    first, second = _same_table(p, q)
    return (first.labels == second.labels.to(first.labels.device)).double().mean().item()


@torch.no_grad()
def total_variation(p: Prediction | Array, q: Prediction | Array) -> float:
    r"""Mean total variation distance of the predictive distributions.

    .. math:: \frac1N \sum_n \frac12 \sum_c |p_{nc} - q_{nc}|

    Args:
        p: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1) as ``(B,)`` or ``(B, 1)``.
        q: The other, at the same inputs.

    Returns:
        The distance, between 0 (the same) and 1.

    Example:
        >>> total_variation([[0.5, 0.5]], [[0.75, 0.25]])
        0.25
    """
    first, second = _same_table(p, q)
    return ((first.probs - second.probs.to(first.probs.device)).abs().sum(-1) / 2).mean().item()


def _same_table(p: Prediction | Array, q: Prediction | Array) -> tuple[ClassTable, ClassTable]:
    first, second = class_table(p, name="p"), class_table(q, name="q")
    if first.probs.shape != second.probs.shape:
        raise InvalidData(
            f"p and q must be predictions of the same classes at the same inputs; got {_size(first)} and "
            f"{_size(second)}. Predict both at the same x."
        )
    return first, second


def _size(table: ClassTable) -> str:
    rows, each, classes = table.probs.shape
    return f"{rows} rows" + (f" x {each} places" if each > 1 else "") + f" x {classes} classes"
