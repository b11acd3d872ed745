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

from knowable.core.chains.kernel import State
from knowable.inference.sampling import window


def open_window(state: State, kind: str) -> None:
    """Begin a new window where the chains are."""
    window.open_window(state, _watched(state), dense=kind == "dense")


def observe(state: State) -> None:
    """Count where the chains are, and the gradients there."""
    window.observe(state, _watched(state))


def _watched(state: State) -> State:
    return {name: state[name] for name in ("position", "gradient")}


def estimate(state: State) -> Tensor | None:
    """The inverse mass that the window's positions and gradients suggest; None if they say too little."""
    if not window.enough(state):
        return None
    positions, gradients = (window.within(state, name)[0] for name in ("position", "gradient"))
    dense = positions.dim() == 2
    spread, slope = (positions.diagonal(), gradients.diagonal()) if dense else (positions, gradients)
    good = torch.isfinite(spread) & torch.isfinite(slope) & (spread > 0) & (slope > 0)
    if not good.all():
        return None
    variance = (spread / slope).sqrt()
    if dense:
        variance = _geometric_mean(positions, gradients, variance.sqrt(), window.freedom(state, "position"))
    return variance.to(state["position"])


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
