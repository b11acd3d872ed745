"""The state of an optimiser as tensors by name, for checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.network.params import without_prefix
from knowable.errors import Unsupported


def saved_state(
    params: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], list[str]]:
    """The state of every parameter, by number and name; and the names of numbers that are not tensors."""
    tensors, plain = {}, []
    for index, param in enumerate(params):
        for name, value in optimiser.state.get(param, {}).items():
            if value is not None:
                tensors[f"optimiser.{index}.{name}"] = _as_tensor(value, optimiser)
                plain += [] if isinstance(value, Tensor) else [f"{index}.{name}"]
    return tensors, plain


def restore_state(
    params: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor], plain: Collection[str]
) -> None:
    """Put a saved state back."""
    for index, param in enumerate(params):
        optimiser.state.pop(param, None)
        if state := without_prefix(f"optimiser.{index}.", tensors):
            optimiser.state[param] = {
                name: value.item() if f"{index}.{name}" in plain else value.clone() for name, value in state.items()
            }


def _as_tensor(value: Any, optimiser: torch.optim.Optimizer) -> Tensor:
    if not isinstance(value, Tensor | int | float):
        raise Unsupported(f"{type(optimiser).__name__} keeps a {type(value).__name__}, which cannot be saved.")
    return torch.as_tensor(value)
