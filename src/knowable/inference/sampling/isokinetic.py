r"""The flow of microcanonical dynamics: constant speed, turned by the gradient (Ver Steeg and Galstyan, 2021).

A step is B(λ) A(½) B(1-2λ) A(½) B(λ) (McLachlan, 1995; minimal error for two gradients): A moves along the direction, B
turns it. Turning by a gradient g = ∇ log p over a time ε is exact: with e = g/|g| and δ = ε|g| / (d-1)

.. math:: u' \propto e\,(1-\zeta)\,(1 + \zeta + (e \cdot u)(1-\zeta)) + 2\zeta u, \qquad \zeta = e^{-\delta}

and the kinetic energy changes by :math:`(d-1)(\delta - \log 2 + \log(1 + e\cdot u + (1 - e\cdot u)\zeta^2))`. Few
dimensions are filled up with independent standard normals that nobody sees, for a direction needs room to turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.fused_step import FusedStep, Gradient
from knowable.core.kernel import State
from knowable.core.target import Target
from knowable.inference.sampling.leapfrog import DIVERGED
from knowable.inference.sampling.metric import Metric, pull, spread

_LAMBDA = 0.1931833275037836
_LEAST_DIMENSIONS = 4


@dataclass(frozen=True)
class Walk:
    """Where all chains are on their way.

    Attributes:
        position: ``(C, D)``.
        extra: Unseen coordinates that fill up few dimensions, ``(C, E)``.
        direction: Unit vectors ``(C, D + E)`` in units of the posterior.
        value: Log densities ``(C,)``.
        gradient: Their gradients ``(C, D)``.
        energy: Change of energy since the walk began, ``(C,)``.
    """

    position: Tensor
    extra: Tensor
    direction: Tensor
    value: Tensor
    gradient: Tensor
    energy: Tensor

    @classmethod
    def of(cls, state: State, direction: Tensor) -> Walk:
        """The beginning of a walk."""
        value = state["value"]
        return cls(
            state["position"], state["extra"], direction, value, state["gradient"], torch.zeros_like(value)
        )  # fmt: skip


class Isokinetic:
    """The flow, all chains at once."""

    @staticmethod
    def extra(dimension: int) -> int:
        """How many unseen coordinates are added."""
        return max(0, _LEAST_DIMENSIONS - dimension)

    def run(self, target: Target, metric: Metric, walk: Walk, step: float, count: int) -> Walk:
        """``count`` steps of every chain."""
        value, extra = walk.value, walk.extra
        first = value - 0.5 * extra.square().sum(-1)

        def time(share: float) -> Tensor:
            return torch.tensor(share * step).to(value)

        direction, kinetic = turn(walk.direction, slope_of(walk.gradient, extra, metric.factor), time(_LAMBDA))
        position, gradient = walk.position, walk.gradient
        half, length, factor = FusedStep(target, half_step), time(0.5), metric.factor
        for k in range(2 * count):  # the last turn of a step and the first of the next are one
            share = 1 - 2 * _LAMBDA if k % 2 == 0 else (2 * _LAMBDA if k + 1 < 2 * count else _LAMBDA)
            position, extra, direction, kinetic, value, gradient = half(
                (position, extra, direction, kinetic), (length, time(share), factor)
            )
        change = kinetic - (value - 0.5 * extra.square().sum(-1)) + first
        return Walk(position, extra, direction, value, gradient, walk.energy + change)

    def langevin(
        self, fused: FusedStep, metric: Metric, walk: Walk, step: float, length: float, noise: Tensor
    ) -> tuple[Walk, Tensor, Tensor]:
        """One step of every chain after which directions are renewed in part, to be forgotten over ``length``.

        ``fused`` is :func:`langevin_step` of a target.

        Returns:
            Where the chains are, the change of energy ``(C,)``, and whether the step was possible ``(C,)``; where it
            was not, a chain stays and faces the other way.
        """
        share = math.sqrt(math.expm1(2 * step / length) / noise.shape[1])
        shared = (torch.tensor(step).to(noise), torch.tensor(share).to(noise), metric.factor)
        chains = (walk.position, walk.extra, walk.direction, walk.value, walk.gradient, noise)
        position, extra, direction, value, gradient, change, good = fused(chains, shared)
        energy = walk.energy + torch.where(good, change, 0.0)
        return Walk(position, extra, direction, value, gradient, energy), change, good


def half_step(
    value_and_grad: Gradient, position: Tensor, extra: Tensor, direction: Tensor, kinetic: Tensor, length: Tensor,
    time: Tensor, factor: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A move of ``length`` along the direction, then a turn by the gradient there over a ``time``."""
    seen = position.shape[1]
    position = position + length * spread(direction[:, :seen], factor)
    extra = extra + length * direction[:, seen:]
    value, gradient = value_and_grad(position)
    direction, change = turn(direction, slope_of(gradient, extra, factor), time)
    return position, extra, direction, kinetic + change, value, gradient


def langevin_step(
    value_and_grad: Gradient, position: Tensor, extra: Tensor, direction: Tensor, value: Tensor, gradient: Tensor,
    noise: Tensor, step: Tensor, share: Tensor, factor: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A whole step, and a direction that is renewed in part."""
    u, kinetic = turn(direction, slope_of(gradient, extra, factor), _LAMBDA * step)
    q, x = position, extra
    v, g = value, gradient
    for time in (1 - 2 * _LAMBDA, _LAMBDA):
        q, x, u, kinetic, v, g = half_step(value_and_grad, q, x, u, kinetic, 0.5 * step, time * step, factor)
    change = kinetic - (v - 0.5 * x.square().sum(-1)) + value - 0.5 * extra.square().sum(-1)
    good = torch.isfinite(change) & (change.abs() < DIVERGED) & torch.isfinite(g).all(-1)
    wide = good.unsqueeze(-1)
    return (
        torch.where(wide, q, position), torch.where(wide, x, extra),
        unit(torch.where(wide, u, -direction) + share * noise), torch.where(good, v, value),
        torch.where(wide, g, gradient), change, good,
    )  # fmt: skip


def slope_of(gradient: Tensor, extra: Tensor, factor: Tensor) -> Tensor:
    """The gradient ``(C, D + E)`` in units of the posterior, that of the unseen coordinates included."""
    return torch.cat([pull(gradient, factor), -extra], dim=-1)


def turn(direction: Tensor, slope: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Turn unit vectors ``(C, d)`` by gradients over a time; also the change of kinetic energy ``(C,)``."""
    dimensions = direction.shape[1]
    norm = slope.square().sum(-1).sqrt().clamp_min(1e-30)
    e = slope / norm.unsqueeze(-1)
    delta = time * norm / (dimensions - 1)
    zeta = (-delta).exp()
    along = (e * direction).sum(-1)
    new = e * ((1 - zeta) * (1 + zeta + along * (1 - zeta))).unsqueeze(-1) + (2 * zeta).unsqueeze(-1) * direction
    new = new / new.square().sum(-1).sqrt().unsqueeze(-1)
    gain = (dimensions - 1) * (delta - math.log(2) + (1 + along + (1 - along) * zeta.square()).log())
    return new, gain


def unit(vectors: Tensor) -> Tensor:
    """Vectors ``(C, d)`` of length one."""
    return vectors / vectors.square().sum(-1, keepdim=True).sqrt()
