r"""The metric of momenta: how far a unit of momentum moves each direction, and how it is learned in the warm-up.

The inverse mass matrix is an estimate of the posterior covariance: a vector of variances (diagonal) or a matrix
(dense). In the warm-up it is estimated anew at the end of windows that double in length (Stan Development Team), from
the spread *within* each chain, pooled over chains: chains that sit in different modes do not inflate it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.kernel import State

CHOICES = ("auto", "diagonal", "dense", "identity")
_DENSE_UP_TO = 100  # dimensions


def kind_for(choice: str, dimension: int) -> str:
    """What ``"auto"`` means: correlations are worth learning where there are few enough of them."""
    if choice != "auto":
        return choice
    return "dense" if dimension <= _DENSE_UP_TO else "diagonal"


class Metric:
    """Momenta for an inverse mass ``(D,)`` or ``(D, D)``."""

    def __init__(self, inverse_mass: Tensor):
        self.inverse_mass = inverse_mass
        self.dense = inverse_mass.dim() == 2
        if self.dense:
            self.factor = _factor(inverse_mass)  # Σ = L Lᵀ
        else:
            self.scale = inverse_mass.sqrt()

    def momentum(self, noise: Tensor) -> Tensor:
        """Momenta p ~ N(0, Σ⁻¹) from standard normal noise ``(C, D)``."""
        if not self.dense:
            return noise / self.scale
        return torch.linalg.solve_triangular(self.factor.T, noise.T, upper=True).T  # L⁻ᵀ z

    def velocity(self, momentum: Tensor) -> Tensor:
        """Σ p."""
        return momentum @ self.inverse_mass if self.dense else momentum * self.inverse_mass

    def kinetic(self, momentum: Tensor) -> Tensor:
        """½ pᵀ Σ p."""
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)

    def spread(self, direction: Tensor) -> Tensor:
        """L u: a direction in units of the posterior as a difference of positions."""
        return direction @ self.factor.T if self.dense else direction * self.scale

    def pull(self, gradient: Tensor) -> Tensor:
        """Lᵀ g: a gradient in units of the posterior."""
        return gradient @ self.factor if self.dense else gradient * self.scale

    def whiten(self, difference: Tensor) -> Tensor:
        """L⁻¹ d: differences of positions in units of the posterior."""
        if not self.dense:
            return difference / self.scale
        return torch.linalg.solve_triangular(self.factor, difference.T, upper=False).T


def _factor(matrix: Tensor) -> Tensor:
    """Cholesky factor, by way of the correlations and in double precision, whatever the scales of the directions."""
    wide = matrix.double()
    scale = wide.diagonal().sqrt()
    correlation = wide / scale.outer(scale)
    identity = torch.eye(len(wide)).to(wide)
    lift = 1e-10
    factor, failed = torch.linalg.cholesky_ex(correlation)
    while failed:  # rounding has made it indefinite
        factor, failed = torch.linalg.cholesky_ex((correlation + lift * identity) / (1 + lift))
        lift = 10 * lift
    return (scale.unsqueeze(-1) * factor).to(matrix)


def initial(kind: str, position: Tensor) -> Tensor:
    """The identity, as a vector or as a matrix."""
    ones = torch.ones(position.shape[1], dtype=position.dtype, device=position.device)
    return ones.diag() if kind == "dense" else ones


# --- learning it -----------------------------------------------------------------------------------------------------


def windows(total: int) -> list[int]:
    """After which transitions of a warm-up of ``total`` the metric is estimated anew.

    The first 15% are left to find the typical set, the last 10% to settle the step size; between them windows double.
    """
    first, last = round(0.15 * total), total - max(round(0.1 * total), min(50, total // 4))
    ends, width, at = [], max(10, round(0.05 * total)), first
    while at + width <= last:
        following = at + width
        ends.append(last if following + 2 * width > last else following)
        at, width = ends[-1], 2 * width
    return ends


def window_opens(total: int) -> int:
    """The transition at which the first window opens."""
    return round(0.15 * total)


def forget(state: State, kind: str, position: Tensor) -> None:
    """Begin a new window at ``position``."""
    shape = (position.shape[1],) * (2 if kind == "dense" else 1)
    state["window.count"] = torch.zeros((), dtype=torch.float64)
    state["window.origin"] = position.clone()
    state["window.sum"] = torch.zeros_like(position, dtype=torch.float64)
    state["window.squares"] = torch.zeros(shape, dtype=torch.float64, device=position.device)


def observe(state: State, position: Tensor) -> None:
    """Count one position of every chain."""
    away = (position - state["window.origin"]).double()  # (C, D), from where the window began: no cancellation
    squares = away.T @ away if state["window.squares"].dim() == 2 else away.square().sum(0)
    state["window.count"] = state["window.count"] + 1
    state["window.sum"] = state["window.sum"] + away
    state["window.squares"] = state["window.squares"] + squares


def estimate(state: State, like: Tensor) -> Tensor | None:
    """The covariance within chains, pooled; None if there is too little to tell.

    A matrix is drawn towards its diagonal, the more the fewer draws there are for each of its dimensions; variances are
    kept away from zero.
    """
    n = state["window.count"].item()
    if n < 5:
        return None
    total, squares = state["window.sum"], state["window.squares"]
    dense = squares.dim() == 2
    freedom = len(total) * (n - 1)
    covariance = (squares - (total.T @ total if dense else total.square().sum(0)) / n) / freedom
    variance = covariance.diagonal() if dense else covariance
    before = state["inverse_mass"].double()
    old = before.diagonal() if dense else before
    variance = torch.where(variance > 1e-30, variance, old)  # a direction that has not moved keeps its scale
    if not dense:
        return variance.to(like)
    weight = freedom / (freedom + 5.0 + len(variance))
    shrunk = weight * covariance
    shrunk.diagonal().copy_(variance)
    return shrunk.to(like)
