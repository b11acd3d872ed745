r"""Metropolis and Hamiltonian moves of chains at temperatures of their own: for Metropolis, annealing and tempering.

A move leaves :math:`p(\theta)^{1/T}` of every chain as it is. Values and gradients in the state are those without T.
Chains come in groups of equal size that lie one after the other (the rungs of a ladder of temperatures; or one group),
each with a step size and a covariance :math:`\Sigma = L L^\top` of its own: L is a vector of standard deviations
(diagonal) or a lower triangle (dense). Σ is estimated from the covariance *within* each chain, pooled over the chains
of a group, so that chains in different modes do not inflate it; early on also from that *between* chains, which begin
further apart than a chain walks while its steps are short. Windows begin short and each is a third longer than the one
before: a direction whose steps are much too short widens in every window.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Info, State
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.inference.sampling.hmc import DIVERGED
from knowable.inference.sampling.metric import Window

MOVES = ("hmc", "metropolis")
_LENGTH = 0.5 * math.pi  # of a mean trajectory in standard deviations: a quarter of a turn decorrelates positions
_NUMBERS = 2**22  # random numbers drawn at once
SHAPES = ("auto", "dense", "diagonal")
_DENSE_UP_TO = 200  # dimensions


@dataclass(frozen=True)
class MoveState(State):
    """The state of N chains that are moved."""

    gradient: Tensor | None  # of the log density, (N, D); None for random walks
    factor: Tensor  # L of every group, (G, D, D) or (G, D)
    log_scale: Tensor  # log of the step size of every group, in units of L, (G,)
    updates: int  # of the step sizes, since L has changed
    window: Window  # positions since the present window of the warm-up opened


M = TypeVar("M", bound=MoveState)


@dataclass(frozen=True)
class Moves(ABC):
    """One kind of move."""

    groups: int = 1  # groups of chains
    dense: bool = True  # whether whole covariances are learned
    steps: int | None = None  # steps of one transition; None is the move's own choice
    target_acceptance: float | None = None  # acceptance rate that step sizes are tuned to; None is the move's own

    def init(self, target: Target, position: Tensor) -> MoveState:
        """The state of chains that begin at ``position`` ``(N, D)``, before any tuning."""
        value, gradient = target.value_and_grad(position)
        factor = identity_factor(self.groups, position, dense=self.dense)
        scale = self._initial_scale(position.shape[1])
        return MoveState(position, value, self.kept_gradient(gradient), factor, scale, 0, self.window(position))

    @abstractmethod
    def kept_gradient(self, gradient: Tensor) -> Tensor | None:
        """The gradient where moves use it, else None."""

    @abstractmethod
    def transition(
        self, target: Target, state: M, temperature: Tensor, *, generator: torch.Generator, tuning: bool = False
    ) -> tuple[M, Info]:
        """Move every chain once."""

    # --- warm-up -----------------------------------------------------------------------------------------------------

    def window(self, position: Tensor) -> Window:
        """A new window of the warm-up."""
        return Window.open(position, dense=self.dense, groups=self.groups)

    def learn(self, state: M, number: int, total: int) -> M:
        """After transition ``number`` of a warm-up of ``total``: count it, and where a window ends estimate L."""
        seen = state.window.observe(state.position)
        if number + 1 not in windows(total):
            return replace(state, window=seen)
        found = estimate(seen, state.factor, within=2 * number >= total)
        if found is not None:
            scale = self._initial_scale(state.position.shape[1])
            state = replace(state, factor=found, log_scale=scale, updates=0)
        return replace(state, window=self.window(state.position))

    def _initial_scale(self, dimension: int) -> Tensor:
        return torch.full((self.groups,), math.log(self._first_scale(dimension)), dtype=torch.float64)

    def _tuned(self, state: M, acceptance: Tensor) -> M:
        r"""Robbins and Monro (1951): :math:`\log s \leftarrow \log s + t^{-0.6} \min(1, \alpha/\alpha^* - 1)`."""
        wanted = self.target_acceptance or self._own_target(state.position.shape[1])
        updates = state.updates + 1
        error = acceptance.double().reshape(self.groups, -1).mean(1).cpu() / wanted - 1
        rate = torch.tensor(updates, dtype=torch.float64) ** -0.6
        return replace(state, log_scale=state.log_scale + rate * error.clamp_max(1.0), updates=updates)

    def _scales(self, state: MoveState) -> Tensor:
        """Step size of every chain, ``(N, 1)``."""
        each = state.log_scale.exp().to(state.position)
        return each.repeat_interleave(len(state.position) // self.groups).unsqueeze(1)

    @abstractmethod
    def _first_scale(self, dimension: int) -> float:
        """Step size that suits a normal whose covariance is known."""

    @abstractmethod
    def _own_target(self, dimension: int) -> float:
        """Acceptance rate that suits the move best."""


@dataclass(frozen=True)
class RandomWalk(Moves):
    r"""Steps of random-walk Metropolis, accepted with probability :math:`\min(1, (p(\theta') / p(\theta))^{1/T})`.

    .. math:: \theta' = \theta + s L z, \quad z \sim N(0, I)

    A transition is a step for every two dimensions, but from 10 to 200: a walk of the best step size takes some three
    for each dimension to decorrelate.
    """

    def kept_gradient(self, gradient: Tensor) -> Tensor | None:
        """None: random walks use no gradient."""
        return None

    def transition(
        self, target: Target, state: M, temperature: Tensor, *, generator: torch.Generator, tuning: bool = False
    ) -> tuple[M, Info]:
        """Several steps of every chain."""
        count = self.steps or min(max(10, state.position.shape[1] // 2), 200)
        most = max(1, _NUMBERS // state.position.numel())
        together = min(most, max(5, count // 10) if tuning else count)  # steps of the same size
        acceptances = []
        for first in range(0, count, together):
            noise, log_uniform = _numbers(min(together, count - first), state.position, generator)
            steps = spread(state.factor, noise) * self._scales(state)
            position, value, acceptance = walk(target, state.position, state.value, steps, log_uniform, temperature)
            state = replace(state, position=position, value=value)
            acceptances.append(acceptance)
            if tuning:
                state = self._tuned(state, acceptance.mean(0))
        return state, Info(acceptance=torch.cat(acceptances).mean(0))

    def _first_scale(self, dimension: int) -> float:
        return 2.38 / math.sqrt(dimension)  # Roberts, Gelman and Gilks (1997)

    def _own_target(self, dimension: int) -> float:
        return 0.44 if dimension == 1 else 0.234


@dataclass(frozen=True)
class Hamiltonian(Moves):
    """Hamiltonian trajectories in coordinates of unit covariance: a quarter of a turn, half more or less.

    All chains take the same number of leapfrog steps, which the first group's step size decides.
    """

    most_steps: int = 100
    most_untuned: int = 10  # while the covariance is unknown

    def kept_gradient(self, gradient: Tensor) -> Tensor | None:
        """The gradient."""
        return gradient

    def transition(
        self, target: Target, state: M, temperature: Tensor, *, generator: torch.Generator, tuning: bool = False
    ) -> tuple[M, Info]:
        """One trajectory of every chain."""
        share, factor = (0.5 + torch.rand(2, generator=generator, device=temperature.device)).tolist()
        factor = min(1.0, factor)  # every other time the step is up to half as long, where the full one is too long
        count = self._count(state, share, factor, tuning)
        momentum, log_uniform = _numbers(1, state.position, generator)
        step = factor * self._scales(state)
        position, value, gradient, change, energy = leapfrogs(target, state, momentum[0], step, count, temperature)
        good = torch.isfinite(change) & torch.isfinite(position).all(1) & torch.isfinite(gradient).all(1)
        acceptance = torch.where(good, (-change).clamp_max(0.0).exp(), 0.0)
        accepted = good & (log_uniform[0] < -change)
        wide = accepted.unsqueeze(1)
        assert state.gradient is not None
        state = replace(
            state,
            position=torch.where(wide, position, state.position),
            value=torch.where(accepted, value, state.value),
            gradient=torch.where(wide, gradient, state.gradient),
        )
        if tuning:
            state = self._tuned(state, acceptance)
        diverging = (~good | (change > DIVERGED)).to(acceptance)
        return state, Info(acceptance, diverging, energy, torch.full_like(acceptance, count))

    def _count(self, state: MoveState, share: float, factor: float, tuning: bool) -> int:
        if self.steps is not None:
            return max(1, round(share * self.steps))
        most = self.most_untuned if tuning and state.updates < 20 else self.most_steps
        return min(most, math.ceil(share * _LENGTH / (factor * math.exp(state.log_scale[0].item()))))

    def _first_scale(self, dimension: int) -> float:
        return dimension**-0.25

    def _own_target(self, dimension: int) -> float:
        return 0.95


def walk(
    target: Target, position: Tensor, value: Tensor, steps: Tensor, log_uniform: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Random-walk ``steps`` ``(count, N, D)``: positions, values, and acceptance probabilities ``(count, N)``."""
    ratios = []
    for step, limit in zip(steps, log_uniform, strict=True):
        proposed = position + step
        new = target.value(proposed)
        ratio = (new - value) / temperature
        accepted = (limit < ratio) & (new < math.inf)  # a ratio that is NaN is not accepted
        position = torch.where(accepted.unsqueeze(1), proposed, position)
        value = torch.where(accepted, new, value)
        ratios.append(ratio)
    acceptance = torch.stack(ratios).nan_to_num(-math.inf, -math.inf, -math.inf).clamp_max(0.0).exp()
    return position, value, acceptance


def leapfrogs(
    target: Target, state: MoveState, momentum: Tensor, step: Tensor, count: int, temperature: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``count`` leapfrog steps of size ``(N, 1)`` from standard normal momenta ``(N, D)``.

    Returns positions, values and gradients at the end, the change of energy, and the energy at the beginning.
    """
    factor, heat = state.factor, temperature.unsqueeze(1)
    position, value, gradient = state.position, state.value, state.gradient
    assert gradient is not None
    energy = 0.5 * momentum.square().sum(1) - value / temperature
    momentum = momentum + 0.5 * step * pull(factor, gradient / heat)
    for k in range(count):
        position = position + step * spread(factor, momentum)
        value, gradient = target.value_and_grad(position)
        kick = step if k + 1 < count else 0.5 * step
        momentum = momentum + kick * pull(factor, gradient / heat)
    change = 0.5 * momentum.square().sum(1) - value / temperature - energy
    return position, value, gradient, change, energy


def _numbers(count: int, position: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standard normals ``(count, N, D)`` and the logs of uniforms ``(count, N)``."""
    kind = {"generator": generator, "dtype": position.dtype, "device": position.device}
    return torch.randn((count, *position.shape), **kind), torch.rand((count, len(position)), **kind).log()


# --- the covariance --------------------------------------------------------------------------------------------------


def is_dense(kind: str, dimension: int) -> bool:
    """Whether ``kind`` means a whole covariance in so many dimensions."""
    return kind == "dense" or (kind == "auto" and dimension <= _DENSE_UP_TO)


def identity_factor(groups: int, like: Tensor, *, dense: bool) -> Tensor:
    """The identity for every group, ``(G, D, D)`` or ``(G, D)``."""
    ones = torch.ones(groups, like.shape[1], dtype=like.dtype, device=like.device)
    return torch.diag_embed(ones) if dense else ones


def spread(factor: Tensor, vectors: Tensor) -> Tensor:
    """L z for every chain of every group, ``(..., G C, D)``."""
    grouped = vectors.unflatten(-2, (len(factor), -1))
    if factor.dim() == 2:
        return (grouped * factor.unsqueeze(1)).flatten(-3, -2)
    return (grouped @ factor.mT).flatten(-3, -2)


def pull(factor: Tensor, vectors: Tensor) -> Tensor:
    """Lᵀ g for every chain of every group, ``(G C, D)``."""
    if factor.dim() == 2:
        return spread(factor, vectors)
    return (vectors.unflatten(0, (len(factor), -1)) @ factor).flatten(0, 1)


def windows(total: int) -> list[int]:
    """After which transitions of a warm-up of ``total`` the shape is estimated again; the last tenth is left alone."""
    last = total - round(0.1 * total)
    ends, width, at = [], 10.0, 0.0
    while at + width <= last:
        at += width
        width *= 1.3
        ends.append(last if at + width > last else round(at))
    return ends


def estimate(seen: Window, before: Tensor, *, within: bool = True) -> Tensor | None:
    """The factor of the covariance of a window; None if it was too short.

    Correlations are shrunk towards zero with the weight of D observations. A direction that did not move at all has
    steps much too long: its standard deviation is taken to be a tenth of what it was. Without ``within`` the covariance
    between the chains of a group is added.
    """
    if not seen.enough:
        return None
    covariance = seen.position.within(seen.count)
    if not within:
        covariance = covariance + seen.position.between(seen.count)
    return _factor_of(covariance, before, seen.position.freedom(seen.count))


def covariance_factor(position: Tensor, before: Tensor) -> Tensor:
    """The factor of the covariance of positions ``(N, D)``, as one group."""
    if before.dim() == 2:
        return _factor_of(position.double().var(0).unsqueeze(0), before, len(position) - 1.0)
    return _factor_of(position.double().T.cov().reshape(1, *before.shape[1:]), before, len(position) - 1.0)


def _factor_of(covariance: Tensor, before: Tensor, freedom: float) -> Tensor:
    if before.dim() == 2:
        return torch.where(covariance > 0, covariance.clamp_min(0.0).sqrt(), 0.1 * before.double()).to(before)
    variance = covariance.diagonal(dim1=1, dim2=2)
    std = torch.where(variance > 0, variance, 0.01 * before.double().square().sum(-1)).sqrt()
    weight = freedom / (freedom + before.shape[-1])
    correlation = weight * covariance / (std.unsqueeze(1) * std.unsqueeze(2))
    correlation.diagonal(dim1=1, dim2=2).fill_(1.0)
    lower, failed = torch.linalg.cholesky_ex(correlation)
    lower = torch.where(failed.reshape(-1, 1, 1) == 0, lower, torch.eye(before.shape[-1]).to(lower))
    return (std.unsqueeze(2) * lower).to(before).contiguous()  # as a checkpoint gives it back, so that bits agree


# --- samplers whose moves are a setting ------------------------------------------------------------------------------


def check_moves(sampler: Any) -> None:
    """Check ``moves``, ``mass``, ``steps`` and ``target_acceptance``."""
    check_choice("moves", sampler.moves, MOVES)
    check_choice("mass", sampler.mass, SHAPES)
    check_random_walk(sampler)


def check_random_walk(sampler: Any) -> None:
    """Check ``steps`` and ``target_acceptance``."""
    if sampler.steps is not None:
        check_count("steps", sampler.steps)
    if sampler.target_acceptance is not None:
        check_number("target_acceptance", sampler.target_acceptance, above=0, below=1)


def moves_of(sampler: Any, dimension: int, groups: int) -> Moves:
    """What moves ``groups`` groups of chains in so many dimensions."""
    make = Hamiltonian if sampler.moves == "hmc" else RandomWalk
    return make(groups, is_dense(sampler.mass, dimension), sampler.steps, sampler.target_acceptance)
