r"""The flow of microcanonical dynamics: constant speed, turned by the gradient (Ver Steeg and Galstyan, 2021).

A step is B(λ) A(½) B(1-2λ) A(½) B(λ) (McLachlan, 1995; minimal error for two gradients): A moves along the direction, B
turns it. Turning by a gradient g = ∇ log p over a time ε is exact: with e = g/|g| and δ = ε|g| / (d-1)

.. math:: u' \propto e\,(1-\zeta)\,(1 + \zeta + (e \cdot u)(1-\zeta)) + 2\zeta u, \qquad \zeta = e^{-\delta}

and the kinetic energy changes by :math:`(d-1)(\delta - \log 2 + \log(1 + e\cdot u + (1 - e\cdot u)\zeta^2))`. Few
dimensions are filled up with independent standard normals that nobody sees, for a direction needs room to turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.batched_gradient import compiled
from knowable.core.kernel import State
from knowable.core.target import Target
from knowable.inference.sampling.metric import Metric

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
    def of(cls, state: State, direction: Tensor, metric: Metric) -> Walk:
        """The beginning of a walk."""
        value = state["value"]
        return cls(
            state["position"], state["extra"], direction, value, state["gradient"], torch.zeros_like(value)
        )  # fmt: skip

    def where(self, chosen: Tensor, other: Walk) -> Walk:
        """This walk for the chains chosen, the other one for the rest."""
        wide = chosen.unsqueeze(-1)
        names = ("position", "extra", "direction", "gradient")
        mixed = {name: torch.where(wide, getattr(self, name), getattr(other, name)) for name in names}
        value, energy = torch.where(chosen, self.value, other.value), torch.where(chosen, self.energy, other.energy)
        return Walk(**mixed, value=value, energy=energy)

    def turned_back(self) -> Walk:
        """The same place, facing the other way."""
        return replace(self, direction=-self.direction)

    def renewed(self, direction: Tensor) -> Walk:
        """The same place, facing another way."""
        return replace(self, direction=direction)


class Isokinetic:
    """The flow, all chains at once."""

    @staticmethod
    def extra(dimension: int) -> int:
        """How many unseen coordinates are added."""
        return max(0, _LEAST_DIMENSIONS - dimension)

    def run(self, target: Target, metric: Metric, walk: Walk, step: float, count: int) -> Walk:
        """``count`` steps of every chain."""
        turn = _turn_for(target, walk.direction)
        seen = walk.position.shape[1]
        position, extra, direction = walk.position, walk.extra, walk.direction
        value, gradient = walk.value, walk.gradient
        first = value - 0.5 * extra.square().sum(-1)
        kinetic = torch.zeros_like(value)

        def turned(weight: float) -> None:
            nonlocal direction, kinetic
            slope = metric.pull(gradient)
            slope = torch.cat([slope, -extra], dim=-1) if extra.shape[1] else slope
            direction, change = turn(direction, slope, torch.full_like(value, weight * step))
            kinetic = kinetic + change

        for k in range(count):
            turned(_LAMBDA if k == 0 else 2 * _LAMBDA)  # the last turn of a step and the first of the next are one
            for part in range(2):
                position = position.add(metric.spread(direction[:, :seen]), alpha=0.5 * step)
                if extra.shape[1]:
                    extra = extra.add(direction[:, seen:], alpha=0.5 * step)
                value, gradient = target.value_and_grad(position)
                if part == 0:
                    turned(1 - 2 * _LAMBDA)
        turned(_LAMBDA)
        change = kinetic - (value - 0.5 * extra.square().sum(-1)) + first
        return Walk(position, extra, direction, value, gradient, walk.energy + change)


def turn(direction: Tensor, slope: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Turn unit vectors ``(C, d)`` by gradients over a time ``(C,)``; also the change of kinetic energy ``(C,)``."""
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


def _turn_for(target: Target, direction: Tensor):
    if not target.function.compiling:
        return turn
    key = ("turn", tuple(direction.shape), direction.dtype)
    if key not in target.fused:
        target.fused[key] = compiled(turn, direction, torch.ones_like(direction), torch.ones_like(direction[:, 0]))
    return target.fused[key]
