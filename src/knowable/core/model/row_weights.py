"""Weights of rows, their own or those of their classes, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.support.checks import check_choice
from knowable.core.support.tensors import check_finite, to_tensor
from knowable.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from knowable.core.model.model import Model


def checked_weights(weights: Any, size: int, in_memory: bool) -> Tensor:
    """Weights of rows ``(N,)`` or ``(N, members)``, or an error that says what is wrong with them."""
    if not in_memory:
        raise InvalidArgument(
            "weights go with rows in memory: pass Data((x, y), weights=w). With a loader give class_weights=, or let a "
            "WeightedRandomSampler draw the rows."
        )
    weights = to_tensor(weights, "weights")
    if weights.dim() not in (1, 2) or weights.shape[0] != size:
        raise InvalidArgument(f"weights must have a number for each of {size} rows, got shape {tuple(weights.shape)}.")
    check_finite(weights, "weights")
    if (weights < 0).any() or not (weights.sum(0) > 0).all():
        raise InvalidArgument("weights must be 0 or above and not all 0.")
    return weights


def checked_class_weights(weights: Any, in_memory: bool) -> Any:
    """A weight for each class or ``"balanced"``, or an error that says what is wrong with them."""
    if isinstance(weights, str):
        check_choice("class_weights", weights, ("balanced",))
        if not in_memory:
            raise InvalidArgument(
                "class_weights='balanced' needs the number of rows of each class, which a loader does not say. Pass a "
                "weight for each class: class_weights=[...]."
            )
        return weights
    weights = check_finite(to_tensor(weights, "class_weights"), "class_weights")
    if weights.dim() != 1 or len(weights) < 2 or (weights < 0).any() or not weights.any():
        raise InvalidArgument(
            f"class_weights must be a number for each class, 0 or above and not all 0, or 'balanced'; got {weights!r}."
        )
    return weights


def weights_of_classes(weights: Any, y: Tensor, model: Model) -> Tensor:
    """The weight of each row's class, ``(batch,)``."""
    labels = y.reshape(len(y), -1)
    if not model.likelihood.labels or labels.shape[1] != 1:
        raise Unsupported(
            f"class_weights need one label in each row, got y of shape {tuple(y.shape)} with "
            f"{type(model.likelihood).__name__}(). Weigh rows themselves: kn.Data((x, y), weights=w)."
        )
    labels, counted = labels[:, 0].long(), model.likelihood.counted(labels[:, 0])
    if counted is not None:
        labels = labels.where(counted, 0)  # rows that are ignored add nothing, whatever their weight
    if isinstance(weights, str):
        known = labels if counted is None else labels[counted]
        counts = torch.bincount(known)
        weights = len(known) / (torch.count_nonzero(counts) * counts.clamp_min(1))
    if labels.max() >= len(weights):
        raise InvalidArgument(
            f"class_weights has {len(weights)} numbers, for the labels 0 to {len(weights) - 1}, but y has the label "
            f"{labels.max().item()}."
        )
    return weights.to(device=y.device, dtype=model.dtype)[labels]
