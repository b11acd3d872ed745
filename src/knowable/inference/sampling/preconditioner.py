r"""Coordinates in which a posterior is about as wide in every direction, learned from positions and gradients.

The inverse mass Σ is an estimate of the posterior covariance. For a normal posterior the gradients of its log density
have covariance :math:`\Sigma^{-1}`, so that positions and gradients together say more than positions alone:

.. math:: \hat\Sigma = \mathrm{Cov}(\theta)\ \#\ \mathrm{Cov}(\nabla \log p)^{-1}, \qquad
    A \# B = A^{1/2} (A^{-1/2} B A^{-1/2})^{1/2} A^{1/2}

the geometric mean, which minimises the Fisher divergence to a normal (Seyboldt, Carlson and Carpenter, 2026). It is
right even where the chains have moved over a small part of the posterior only: the extent of the part cancels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.kernel import State


def forget(state: State, kind: str) -> None:
    """Begin a new window where the chains are."""
    for name in ("position", "gradient"):
        here = state[name]
        shape = (here.shape[1],) * (2 if kind == "dense" else 1)
        state[f"window.{name}.origin"] = here.clone()
        state[f"window.{name}.sum"] = torch.zeros_like(here, dtype=torch.float64)
        state[f"window.{name}.squares"] = torch.zeros(shape, dtype=torch.float64, device=here.device)
    state["window.count"] = torch.zeros((), dtype=torch.float64)


def observe(state: State) -> None:
    """Count where the chains are, and the gradients there."""
    for name in ("position", "gradient"):
        away = (state[name] - state[f"window.{name}.origin"]).double()  # (C, D)
        squares = state[f"window.{name}.squares"]
        state[f"window.{name}.sum"] += away
        squares += away.T @ away if squares.dim() == 2 else away.square().sum(0)
    state["window.count"] += 1


def estimate(state: State) -> Tensor | None:
    """The inverse mass that the window's positions and gradients suggest; None if they say too little."""
    n = state["window.count"].item()
    freedom = len(state["position"]) * (n - 1)
    if n < 5:
        return None
    positions, gradients = _within(state, "position", freedom), _within(state, "gradient", freedom)
    dense = positions.dim() == 2
    spread, slope = (positions.diagonal(), gradients.diagonal()) if dense else (positions, gradients)
    good = torch.isfinite(spread) & torch.isfinite(slope) & (spread > 0) & (slope > 0)
    if not good.all():
        return None
    variance = (spread / slope).sqrt()
    if dense:
        variance = _geometric_mean(positions, gradients, variance.sqrt(), freedom)
    return variance.to(state["position"])


def _within(state: State, name: str, freedom: float) -> Tensor:
    """Covariance within chains, pooled."""
    total, squares, n = state[f"window.{name}.sum"], state[f"window.{name}.squares"], state["window.count"]
    means = total.T @ total if squares.dim() == 2 else total.square().sum(0)
    return (squares - means / n) / freedom


def _geometric_mean(positions: Tensor, gradients: Tensor, scale: Tensor, freedom: float) -> Tensor:
    """Of one covariance and the inverse of the other; correlations that few draws support are drawn towards none."""
    trust = 1 - (len(scale) / (freedom + len(scale))) ** 2

    def root(matrix: Tensor, power: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * values.clamp_min(1e-12 * values[-1]) ** power @ vectors.T

    def shrunk(matrix: Tensor) -> Tensor:
        return trust * matrix + (1 - trust) * matrix.diagonal().diag()

    a, b = shrunk(positions / scale.outer(scale)), shrunk(gradients * scale.outer(scale))
    half, inverse_half = root(a, 0.5), root(a, -0.5)
    middle = root(inverse_half @ root(b, -1.0) @ inverse_half, 0.5)
    mean = half @ middle @ half
    return 0.5 * (mean + mean.T) * scale.outer(scale)
