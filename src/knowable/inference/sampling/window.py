"""What chains have gone through since a window of the warm-up opened, as sums from which covariances follow.

Sums are of distances from where the window opened, in double precision, so that nothing cancels. Chains may come in
groups of equal size that lie one after the other; each group then has a covariance of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.chains.kernel import State

FEWEST = 5  # observations of every chain from which something can be told


def open_window(state: State, values: dict[str, Tensor], *, dense: bool, groups: int = 1) -> None:
    """Begin a new window at ``values``, each ``(N, D)``; ``dense`` asks for whole covariances."""
    for name, value in values.items():
        dimension = value.shape[1]
        shape = (groups, dimension, dimension) if dense else (groups, dimension)
        state[f"window.{name}.origin"] = value.clone()
        state[f"window.{name}.sum"] = torch.zeros_like(value, dtype=torch.float64)
        state[f"window.{name}.squares"] = torch.zeros(shape, dtype=torch.float64, device=value.device)
    state["window.count"] = torch.zeros((), dtype=torch.float64)


def observe(state: State, values: dict[str, Tensor]) -> None:
    """Count one value of every chain."""
    for name, value in values.items():
        away = (value - state[f"window.{name}.origin"]).double()
        squares = state[f"window.{name}.squares"]
        state[f"window.{name}.sum"] = state[f"window.{name}.sum"] + away
        state[f"window.{name}.squares"] = squares + _products(away, squares)
    state["window.count"] = state["window.count"] + 1


def enough(state: State) -> bool:
    """Whether a window is long enough to tell something."""
    return state["window.count"].item() >= FEWEST


def freedom(state: State, name: str) -> float:
    """Degrees of freedom of :func:`within`: observations of a group less one for the mean of each of its chains."""
    chains = len(state[f"window.{name}.sum"]) // len(state[f"window.{name}.squares"])
    return chains * (state["window.count"].item() - 1)


def within(state: State, name: str) -> Tensor:
    """Covariance within chains, pooled over the chains of each group: ``(G, D, D)`` or its diagonals ``(G, D)``."""
    total, squares, n = state[f"window.{name}.sum"], state[f"window.{name}.squares"], state["window.count"].item()
    return (squares - _products(total, squares) / n) / freedom(state, name)


def between(state: State, name: str) -> Tensor:
    """Covariance of the chains' means in each group, as :func:`within`; zero where a group has one chain."""
    total, squares, n = state[f"window.{name}.sum"], state[f"window.{name}.squares"], state["window.count"].item()
    means = (state[f"window.{name}.origin"].double() + total / n).unflatten(0, (len(squares), -1))
    away = (means - means.mean(1, keepdim=True)).flatten(0, 1)
    return _products(away, squares) / max(1, means.shape[1] - 1)


def _products(vectors: Tensor, like: Tensor) -> Tensor:
    """Σ v vᵀ over the chains ``(N, D)`` of each group, or its diagonal."""
    grouped = vectors.unflatten(0, (len(like), -1))
    return grouped.mT @ grouped if like.dim() == 3 else grouped.square().sum(1)
