r"""The metric of momenta: how far a unit of momentum moves each direction, and how it is learned in the warm-up.

The inverse mass matrix is an estimate of the posterior covariance: a vector of variances (diagonal) or a matrix
(dense). In the warm-up it is estimated anew at the end of windows that double in length (Stan Development Team), from
the spread *within* each chain, pooled over chains: chains that sit in different modes do not inflate it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knowable.core.chains.kernel import State
from knowable.inference.sampling import window

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
        self.factor = _factor(inverse_mass) if self.dense else inverse_mass.sqrt()  # Σ = L Lᵀ; or its diagonal

    def momentum(self, noise: Tensor) -> Tensor:
        """Momenta p ~ N(0, Σ⁻¹) from standard normal noise ``(C, D)``."""
        if not self.dense:
            return noise / self.factor
        return torch.linalg.solve_triangular(self.factor.T, noise.T, upper=True).T  # L⁻ᵀ z

    def velocity(self, momentum: Tensor) -> Tensor:
        """Σ p."""
        return velocity(momentum, self.inverse_mass)

    def kinetic(self, momentum: Tensor) -> Tensor:
        """½ pᵀ Σ p."""
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)

    def spread(self, direction: Tensor) -> Tensor:
        """L u: a direction in units of the posterior as a difference of positions."""
        return spread(direction, self.factor)

    def pull(self, gradient: Tensor) -> Tensor:
        """Lᵀ g: a gradient in units of the posterior."""
        return pull(gradient, self.factor)

    def whiten(self, difference: Tensor) -> Tensor:
        """L⁻¹ d: differences of positions in units of the posterior."""
        if not self.dense:
            return difference / self.factor
        return torch.linalg.solve_triangular(self.factor, difference.T, upper=False).T


def velocity(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Σ p, for a vector or a matrix Σ."""
    return momentum @ inverse_mass if inverse_mass.dim() == 2 else momentum * inverse_mass


def spread(direction: Tensor, factor: Tensor) -> Tensor:
    """L u, for a triangle L or a vector of standard deviations."""
    return direction @ factor.T if factor.dim() == 2 else direction * factor


def pull(gradient: Tensor, factor: Tensor) -> Tensor:
    """Lᵀ g, for a triangle L or a vector of standard deviations."""
    return gradient @ factor if factor.dim() == 2 else gradient * factor


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


def relative(new: Tensor, old: Tensor) -> float:
    """How much longer the unit of the new metric is, as a geometric mean over directions."""
    variances = [each.diagonal() if each.dim() == 2 else each for each in (new, old)]
    return math.exp(0.5 * (variances[0].double().log() - variances[1].double().log()).mean().item())


# --- learning it -----------------------------------------------------------------------------------------------------


def windows(total: int) -> list[int]:
    """After which transitions of a warm-up of ``total`` the metric is estimated anew.

    The first 15% are left to find the typical set, the last 10% to settle the step size; between them windows double.
    """
    last = total - max(round(0.1 * total), min(50, total // 4))
    return _doubling(window_opens(total), max(10, round(0.05 * total)), last)


def early_windows(total: int) -> list[int]:
    """After which transitions it is estimated while chains still look for the typical set.

    What is found there is soon forgotten; but where scales are far apart, steps that fit the narrowest direction get
    nowhere in the widest, and each estimate lets the next trajectories go further.
    """
    return _doubling(0, 10, window_opens(total))


def window_opens(total: int) -> int:
    """The transition at which the first window opens."""
    return round(0.15 * total)


def _doubling(first: int, width: int, last: int) -> list[int]:
    """Ends of windows from ``first`` on, each twice as wide as the one before; the last one takes the rest."""
    ends, at = [], first
    while at + width <= last:
        following = at + width
        ends.append(last if following + 2 * width > last else following)
        at, width = ends[-1], 2 * width
    return ends


def open_window(state: State, kind: str) -> None:
    """Begin to count positions where the chains are."""
    window.open_window(state, {"position": state["position"]}, dense=kind == "dense")


def learn(state: State, kind: str, positions: Tensor, first: int, total: int) -> bool:
    """Count positions ``(n, C, D)`` of transitions ``first``, ... of a warm-up of ``total``.

    Where a window ends the metric is estimated anew; a window may only end with the last position.

    Returns:
        Whether the metric has changed.
    """
    if kind == "identity":
        return False
    for number, position in enumerate(positions, first):
        if number == window_opens(total):
            open_window(state, kind)
        window.observe(state, {"position": position})
    if first + len(positions) not in (*early_windows(total), *windows(total)):
        return False
    found = estimate(state)
    open_window(state, kind)
    if found is None:
        return False
    state["inverse_mass"] = found
    return True


def estimate(state: State) -> Tensor | None:
    """The covariance within chains, pooled; None if there is too little to tell.

    A matrix is drawn towards a diagonal one in the units of the metric before, the more the fewer draws there are for
    each of its dimensions: correlations that are nearly perfect stay, once they are known. Variances are kept away from
    zero: a direction that has not moved keeps its scale.
    """
    if not window.enough(state):
        return None
    before = state["inverse_mass"]
    covariance = window.within(state, "position")[0]
    if covariance.dim() == 1:
        return torch.where(covariance > 1e-30, covariance, before.double()).to(before)
    known = _factor(before.double())
    half = torch.linalg.solve_triangular(known, covariance, upper=False)
    whitened = torch.linalg.solve_triangular(known, half.T, upper=False)  # L⁻¹ C L⁻ᵀ
    variance = whitened.diagonal()
    freedom = window.freedom(state, "position")
    shrunk = freedom / (freedom + 5.0 + len(variance)) * whitened
    shrunk.diagonal().copy_(torch.where(variance > 1e-30, variance, 1.0))
    return (known @ shrunk @ known.T).to(before)
