"""What a posterior says can go: weights whose noise drowns them, counted layer by layer, and the network without them.

Written out from the definition, apart from the library's own tools for compressing, which are compared with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from knowable.core.network.params import Params
    from knowable.core.posterior.posterior import Posterior

THRESHOLD = 3.0
"""Weights with log alpha above this go: the variance of their noise is 20 times their square."""


def kept_weights(posterior: Posterior, *, threshold: float = THRESHOLD) -> dict[str, Tensor]:
    """For every random matrix or kernel: which elements have log alpha = log(sd² / mean²) up to the threshold."""
    mean, std = posterior.mean(), posterior.std()
    noisy = (name for name in mean if mean[name].dim() > 1 and (std[name] > 0).any())
    return {name: 2 * (std[name].log() - mean[name].abs().log()) <= threshold for name in noisy}


def pruned(posterior: Posterior, kept: dict[str, Tensor]) -> Params:
    """The mean parameters, zero where they are not kept."""
    return {name: value * kept[name] if name in kept else value for name, value in posterior.mean().items()}


def error_percent(posterior: Posterior, params: Params, x: Tensor, y: Tensor, *, batch: int = 1_000) -> float:
    """Share of wrong labels of the network with these parameters, in percent."""
    model = posterior.model
    with torch.no_grad():
        wrong = sum(
            (model.forward(params, rows, buffers=posterior.buffers).argmax(1) != labels).sum().item()
            for rows, labels in zip(x.split(batch), y.split(batch), strict=True)
        )
    return 100.0 * wrong / y.numel()


def counts(kept: dict[str, Tensor]) -> dict[str, Any]:
    """Sparsity of every layer in percent, weights in all and those kept, and their ratio."""
    total, nonzero = (sum(count(each) for each in kept.values()) for count in (Tensor.numel, _true))
    return {
        "sparsity": {name: 100.0 - 100.0 * _true(each) / each.numel() for name, each in kept.items()},
        "weights": total,
        "nonzero": nonzero,
        "compression": total / nonzero if nonzero else None,
    }


def _true(mask: Tensor) -> int:
    return int(mask.sum().item())
