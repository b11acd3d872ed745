r"""The mass matrix of momenta, and how it is learned in the warm-up.

The inverse mass matrix Σ is an estimate of the posterior covariance: a vector of variances (diagonal) or a matrix
(dense). In the warm-up it is estimated again at the end of windows that double in length (Stan Development Team), from
the covariance *within* each chain, pooled over chains: chains that sit in different modes do not inflate it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import State

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

    def whiten(self, difference: Tensor) -> Tensor:
        """L⁻¹ d: differences of positions in units of the posterior."""
        if not self.dense:
            return difference / self.factor
        return torch.linalg.solve_triangular(self.factor, difference.T, upper=False).T


def velocity(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Σ p, for a vector or a matrix Σ."""
    return momentum @ inverse_mass if inverse_mass.dim() == 2 else momentum * inverse_mass


def spread(direction: Tensor, factor: Tensor) -> Tensor:
    """L u, for a triangle L or a vector of standard deviations: from units of the posterior to positions."""
    return direction @ factor.T if factor.dim() == 2 else direction * factor


def pull(gradient: Tensor, factor: Tensor) -> Tensor:
    """Lᵀ g, for a triangle L or a vector of standard deviations: a gradient in units of the posterior."""
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
    """Ratio of the standard deviations of two inverse mass matrices, a geometric mean over directions."""
    variances = [each.diagonal() if each.dim() == 2 else each for each in (new, old)]
    return math.exp(0.5 * (variances[0].double().log() - variances[1].double().log()).mean().item())


# --- learning it -----------------------------------------------------------------------------------------------------


def windows(total: int) -> list[int]:
    """After which transitions of a warm-up of ``total`` the mass matrix is estimated again.

    The first 15% are left to find the typical set, the last 10% to settle the step size; between them windows double.
    """
    last = total - max(round(0.1 * total), min(50, total // 4))
    return _doubling(window_opens(total), max(10, round(0.05 * total)), last)


def early_windows(total: int) -> list[int]:
    """After which transitions it is estimated while chains have not reached the typical set.

    These estimates are soon replaced; but where scales are far apart, steps that fit the narrowest direction get
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


@dataclass(frozen=True)
class MetricState(State):
    """The state of chains that follow the gradient and learn a mass matrix."""

    gradient: Tensor  # of the log density, (C, D)
    inverse_mass: Tensor  # Σ, (D,) or (D, D)
    window: Window  # positions since the present window of the warm-up opened


M = TypeVar("M", bound=MetricState)


def learn(state: M, kind: str, positions: Tensor, first: int, total: int) -> M:
    """Count positions ``(n, C, D)`` of transitions ``first``, ... of a warm-up of ``total``.

    Where a window ends the mass matrix is estimated again (the state then has another ``inverse_mass``); a window may
    only end with the last position.
    """
    if kind == "identity":
        return state
    seen, dense = state.window, kind == "dense"
    for number, position in enumerate(positions, first):
        if number == window_opens(total):
            seen = Window.open(state.position, dense=dense)
        seen = seen.observe(position)
    if first + len(positions) not in (*early_windows(total), *windows(total)):
        return replace(state, window=seen)
    found = estimate(seen, state.inverse_mass)
    inverse_mass = state.inverse_mass if found is None else found
    return replace(state, inverse_mass=inverse_mass, window=Window.open(state.position, dense=dense))


def estimate(seen: Window, before: Tensor) -> Tensor | None:
    """The covariance within chains, pooled; None if there is too little to tell.

    A matrix is shrunk towards a diagonal one in the units of the mass matrix ``before``, the more the fewer draws there
    are for each of its dimensions: correlations that are nearly perfect stay, once they are known. Variances are kept
    away from zero: a direction that has not moved keeps its scale.
    """
    if not seen.enough:
        return None
    covariance = seen.position.within(seen.count)[0]
    if covariance.dim() == 1:
        return torch.where(covariance > 1e-30, covariance, before.double()).to(before)
    known = _factor(before.double())
    half = torch.linalg.solve_triangular(known, covariance, upper=False)
    whitened = torch.linalg.solve_triangular(known, half.T, upper=False)  # L⁻¹ C L⁻ᵀ
    variance = whitened.diagonal()
    freedom = seen.position.freedom(seen.count)
    shrunk = freedom / (freedom + 5.0 + len(variance)) * whitened
    shrunk.diagonal().copy_(torch.where(variance > 1e-30, variance, 1.0))
    return (known @ shrunk @ known.T).to(before)


# --- windows of the warm-up ------------------------------------------------------------------------------------------

FEWEST = 5  # observations of every chain from which a covariance can be estimated


@dataclass(frozen=True)
class Sums:
    """Sums of one quantity ``(N, D)`` over a window, from which covariances follow.

    Sums are of differences from the values where the window opened, in double precision, so that nothing cancels.
    Chains may come in G groups of equal size that lie one after the other; each then has a covariance of its own.
    """

    origin: Tensor  # values where the window opened, (N, D)
    total: Tensor  # sum of the differences, (N, D)
    squares: Tensor  # sum of their products, (G, D, D) or its diagonals (G, D)

    @classmethod
    def open(cls, value: Tensor, *, dense: bool, groups: int = 1) -> Sums:
        """Nothing seen yet."""
        shape = (groups, *value.shape[1:] * (2 if dense else 1))
        total = torch.zeros_like(value, dtype=torch.float64)
        return cls(value.clone(), total, torch.zeros(shape, dtype=torch.float64, device=value.device))

    def observe(self, value: Tensor) -> Sums:
        """With one more value of every chain."""
        away = (value - self.origin).double()
        return Sums(self.origin, self.total + away, self.squares + _products(away, self.squares))

    def freedom(self, count: int) -> int:
        """Degrees of freedom of :meth:`within`: observations of a group less one for the mean of each of its chains."""
        return len(self.total) // len(self.squares) * (count - 1)

    def within(self, count: int) -> Tensor:
        """Covariance within chains, pooled over the chains of each group: ``(G, D, D)`` or its diagonals ``(G, D)``."""
        return (self.squares - _products(self.total, self.squares) / count) / self.freedom(count)

    def between(self, count: int) -> Tensor:
        """Covariance of the chains' means in each group, as :meth:`within`; zero where a group has one chain."""
        means = (self.origin.double() + self.total / count).unflatten(0, (len(self.squares), -1))
        away = (means - means.mean(1, keepdim=True)).flatten(0, 1)
        return _products(away, self.squares) / max(1, means.shape[1] - 1)


@dataclass(frozen=True)
class Window:
    """Positions, and gradients where they are asked for, that chains have had since a window of the warm-up opened."""

    count: int
    position: Sums
    gradient: Sums | None = None

    @classmethod
    def open(cls, position: Tensor, gradient: Tensor | None = None, *, dense: bool, groups: int = 1) -> Window:
        """Begin a window where chains are, ``(N, D)``; ``dense`` asks for whole covariances."""
        slopes = None if gradient is None else Sums.open(gradient, dense=dense, groups=groups)
        return cls(0, Sums.open(position, dense=dense, groups=groups), slopes)

    def observe(self, position: Tensor, gradient: Tensor | None = None) -> Window:
        """With one more position of every chain, and its gradient."""
        slopes = None if self.gradient is None or gradient is None else self.gradient.observe(gradient)
        return Window(self.count + 1, self.position.observe(position), slopes)

    @property
    def enough(self) -> bool:
        """Whether there are enough observations for a covariance."""
        return self.count >= FEWEST


def _products(vectors: Tensor, like: Tensor) -> Tensor:
    """Σ v vᵀ over the chains ``(N, D)`` of each group, or its diagonal."""
    grouped = vectors.unflatten(0, (len(like), -1))
    return grouped.mT @ grouped if like.dim() == 3 else grouped.square().sum(1)
