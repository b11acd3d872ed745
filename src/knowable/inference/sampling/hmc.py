"""Hamiltonian Monte Carlo (Duane et al., 1987; Neal, 2011), with a trajectory length that tunes itself (ChEES)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Gradient
from knowable.core.chains.kernel import Block, Info, Kernel, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count, check_type
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling.metric import Metric, MetricState, velocity
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.tuning import (
    SHORTEST,
    DualAveraging,
    begin,
    check_tuning,
    harmonic_mean,
    initial_step_size,
    tunes_at_modes,
)

S = TypeVar("S", bound=Any)


@dataclass(frozen=True, repr=False, kw_only=True)
class HMC(Sampler):
    r"""Chains that follow the gradient along Hamiltonian trajectories, all chains in step.

    .. math:: H(\theta, p) = -\log p(D, \theta) + \tfrac12 p^\top \Sigma p

    A trajectory of leapfrog steps is proposed and accepted with probability :math:`\min(1, e^{-\Delta H})`. In the
    warm-up the step size is tuned by dual averaging, the mass by the spread within chains, and the trajectory length by
    ChEES (Hoffman, Radul and Sountsov, 2021), the change in the estimator of the expected square: it makes the squared
    distance from the mean change as much as possible. Lengths are jittered by a Halton sequence, the same for all
    chains, so that no direction is traversed a whole number of times.

    Args:
        chains: Chains that advance together.
        draws: Draws kept of each chain, or None to go on until the chains have mixed.
        max_gradients: Where ``draws`` is None: gradients of each chain, warm-up included, after which the run ends even
            where the chains have not mixed; None is no limit.
        warmup: Transitions before the first draw, in which the sampler tunes itself; None is 500.
        start: Where the chains of a network begin: ``"ensemble"`` (one trained network each), ``"map"`` (one for all),
            ``"prior"`` (draws from it), ``"network"`` (its own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        storage: How draws are kept (:class:`~knowable.ChainStorage`): thinning, number format, memory, a file.
        step_size: Leapfrog step, or None to tune it.
        mass: ``"diagonal"``, ``"dense"``, ``"identity"``, or ``"auto"``: dense up to 100 dimensions, diagonal beyond.
        target_acceptance: Acceptance probability the step size is tuned to, as a harmonic mean over chains: a few that
            are stuck count for much.
        steps: Leapfrog steps of a trajectory, the mean where they are jittered, or None to tune it.
        jitter: Whether trajectory lengths vary evenly between 0 and twice the mean, and every fifth has smaller steps
            so that no chain is stuck for long where the density is narrow; or all are the same.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.HMC(chains=4, draws=100).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([4, 100, 2])
    """

    family = "sampling"
    summary = "Hamiltonian trajectories of a length that tunes itself, all chains in step"
    references = ("duane1987", "neal2011", "hoffman2021")

    step_size: float | None = None
    mass: str = "auto"
    target_acceptance: float = 0.8
    steps: int | None = None
    jitter: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tuning(self)
        if self.steps is not None:
            check_count("steps", self.steps)
        check_type("jitter", self.jitter, bool, "True or False")

    def kernel(self, dimension: int) -> HMCKernel:
        """The transition."""
        return HMCKernel(self, metrics.kind_for(self.mass, dimension))

    begins_near_modes = tunes_at_modes


_FIRST_STEPS = 4  # of a trajectory, before its length is tuned

# Once the step size is tuned, every fifth trajectory has a quarter of it: that frees chains that are stuck where the
# density is narrow and every longer step is rejected.
SMALL_STEP_EVERY, SMALL_STEP = 5, 0.25
DIVERGED = 1000.0  # energy error in nats beyond which a trajectory counts as diverging


@dataclass(frozen=True)
class HMCState(MetricState):
    """The state of HMC."""

    step: DualAveraging  # the step size
    length: TrajectoryLength  # the trajectory length
    centre: Tensor  # running mean of every chain's positions, (C, D)
    transitions: int = 0  # made so far, warm-up included


@dataclass(frozen=True)
class HMCKernel(Kernel):
    """Trajectories of the same number of leapfrog steps for all chains."""

    settings: HMC
    mass: str
    most_steps: int = 1000

    state_type = HMCState
    splits = ("position", "value", "gradient")

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> HMCState:
        """Where the chains begin, before any tuning."""
        common = begin(target, position, self.settings, self.mass, generator=generator)
        step = self.settings.step_size or initial_step_size(
            target, position, Metric(common["inverse_mass"]), generator=generator
        )
        length = TrajectoryLength.begin(step * (self.settings.steps or _FIRST_STEPS))
        return HMCState(**common, step=DualAveraging.begin(step), length=length, centre=position.clone())

    def advance(
        self, target: Target, state: HMCState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[HMCState, Block]:
        """``n`` trajectories of every chain."""
        metric, found = Metric(state.inverse_mass), []
        for i in target.in_time(n):
            share = halton(state.transitions + 1) if self.settings.jitter else 0.5
            step = self._step(state, warmup)
            count = self._count(state, step, share, warmup)
            if warmup is None and self.settings.jitter and state.transitions % SMALL_STEP_EVERY == 0:
                step = step * SMALL_STEP
            noise = standard_normal(state.position, generator)
            proposal = trajectory(target, metric, state, noise, step, count)
            uniform = torch.rand(len(noise), generator=generator, dtype=noise.dtype, device=noise.device)
            before = state
            if warmup is not None:
                state = self._tuned_state(state, proposal, metric, share, warmup.first + i, warmup.total)
            state = replace(accept(state, proposal, uniform), transitions=state.transitions + 1)
            if warmup is not None:
                number = warmup.first + i
                state = metrics.learn(state, self.mass, state.position.unsqueeze(0), number, warmup.total)
                if state.inverse_mass is not before.inverse_mass:
                    metric = Metric(state.inverse_mass)
                    early = number < metrics.window_opens(warmup.total)
                    state = self._restart(target, state, metric, before.inverse_mass, generator, early)
            steps = torch.full_like(proposal.acceptance, count)
            diverging = proposal.diverging.to(noise.dtype)
            found.append((state, Info(proposal.acceptance, diverging, proposal.energy, steps)))
        return state, Block.stack(found)

    def tuned(self, state: HMCState) -> dict[str, float]:
        """Step size and trajectory length."""
        step = self._step(state, None)
        return {"step_size": step, "trajectory_steps": float(self._count(state, step, 0.5, None))}

    def _step(self, state: HMCState, warmup: WarmUp | None) -> float:
        return self.settings.step_size or (state.step.final if warmup is None else state.step.current)

    def _count(self, state: HMCState, step: float, share: float, warmup: WarmUp | None) -> int:
        """Leapfrog steps of a trajectory that is ``2 share`` times the mean length."""
        if self.settings.steps is not None:
            return max(1, math.ceil((2 * share if self.settings.jitter else 1.0) * self.settings.steps))
        length = state.length.final if warmup is None else state.length.current
        return max(1, min(self.most_steps, math.ceil(2 * share * length / step)))

    def _tuned_state(
        self, state: HMCState, proposal: Proposal, metric: Metric, share: float, number: int, total: int
    ) -> HMCState:
        settings, step, length = self.settings, state.step, state.length
        if settings.step_size is None and total >= SHORTEST:
            step = step.update([harmonic_mean(proposal.acceptance)], settings.target_acceptance)
        if settings.steps is None and number >= total // 10:  # the step size has to be about right before
            before, after = (metric.whiten(each.position - state.centre) for each in (state, proposal))
            speed = metric.whiten(proposal.velocity)
            length = length.update(before, after, speed, proposal.acceptance, share=share, step=step.final)
        centre = running_mean(state.centre, state.position, number)
        return replace(state, step=step, length=length, centre=centre)

    def _restart(
        self, target: Target, state: HMCState, metric: Metric, before: Tensor, generator: torch.Generator, early: bool
    ) -> HMCState:
        """Step size and length for a new mass matrix: the step is searched again, early on the length as well."""
        if self.settings.step_size is not None:
            return state
        step = initial_step_size(target, state.position, metric, generator=generator)
        length = state.length.final / metrics.relative(state.inverse_mass, before)
        new = TrajectoryLength.begin(_FIRST_STEPS * step if early else max(length, step))
        return replace(state, step=DualAveraging.begin(step, initial_factor=2.0), length=new)


# --- one trajectory --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposal:
    """Where trajectories end, and the probability of accepting that."""

    position: Tensor
    value: Tensor
    gradient: Tensor
    velocity: Tensor
    acceptance: Tensor
    diverging: Tensor
    energy: Tensor


def trajectory(target: Target, metric: Metric, state: Any, noise: Tensor, step: float, count: int) -> Proposal:
    """``count`` leapfrog steps of every chain from fresh momenta."""
    position, gradient, value = state.position, state.gradient, state.value
    momentum = metric.momentum(noise)
    energy = metric.kinetic(momentum) - value
    leap, shared = FusedStep(target, leapfrog), (torch.tensor(step).to(noise), metric.inverse_mass)
    for _ in range(count):
        position, momentum, gradient, value = leap((position, momentum, gradient), shared)
    change = metric.kinetic(momentum) - value - energy
    good = torch.isfinite(change) & torch.isfinite(position).all(-1) & torch.isfinite(gradient).all(-1)
    whole = good.unsqueeze(-1)
    return Proposal(
        position=torch.where(whole, position, state.position),
        value=torch.where(good, value, state.value),
        gradient=torch.where(whole, gradient, state.gradient),
        velocity=torch.where(whole, metric.velocity(momentum), 0.0),
        acceptance=torch.where(good, (-change).clamp_max(0.0).exp(), 0.0),
        diverging=~good | (change > DIVERGED),
        energy=energy,
    )


def accept(state: S, proposal: Proposal, uniform: Tensor) -> S:
    """The Metropolis test of every chain, by uniform numbers ``(C,)``."""
    accepted = uniform < proposal.acceptance
    wide = accepted.unsqueeze(-1)
    return replace(
        state,
        position=torch.where(wide, proposal.position, state.position),
        value=torch.where(accepted, proposal.value, state.value),
        gradient=torch.where(wide, proposal.gradient, state.gradient),
    )


def leapfrog(
    value_and_grad: Gradient, position: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, inverse_mass: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half a step of the momentum, one of the position, and the other half."""
    half = momentum + 0.5 * step * gradient
    position = position + step * velocity(half, inverse_mass)
    value, gradient = value_and_grad(position)
    return position, half + 0.5 * step * gradient, gradient, value


def standard_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Noise of the shape of ``like``."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


# --- the trajectory length -------------------------------------------------------------------------------------------

_RATE = 0.03  # of the steps on log T
_MEMORY = 0.9  # of the exponential moving averages
_MOST_STEPS = 500.0


@dataclass(frozen=True)
class TrajectoryLength:
    r"""The length at which a trajectory achieves most for its cost, being tuned.

    What it achieves is ChEES, the change in the estimator of the expected square (Hoffman, Radul and Sountsov, 2021)

    .. math:: C = \tfrac14 E\big[(\|\theta' - \bar\theta\|^2 - \|\theta - \bar\theta\|^2)^2\big]

    and its cost is its length T: C / T is increased by gradient steps on log T, the same for all chains (without the
    division lengths that wander beyond the best one never come back, for C is flat there). Distances are in units of
    the posterior and from each chain's own running mean, so that chains in different modes do not mislead it. Lengths
    are jittered between 0 and twice the mean.
    """

    log_length: float  # log of the mean length to use while tuning
    log_averaged: float  # log of the averaged one, to use afterwards
    slope: float = 0.0  # exponential moving average of dC / d log T
    change: float = 0.0  # the same of C
    updates: int = 0  # how often it was updated

    @classmethod
    def begin(cls, length: float) -> TrajectoryLength:
        """From ``length``."""
        return cls(math.log(length), math.log(length))

    @property
    def current(self) -> float:
        """The mean length to use while tuning."""
        return math.exp(self.log_length)

    @property
    def final(self) -> float:
        """The mean length to use once tuning has ended."""
        return math.exp(self.log_averaged)

    def update(
        self, before: Tensor, after: Tensor, velocity: Tensor, acceptance: Tensor, *, share: float, step: float
    ) -> TrajectoryLength:
        """One step up the gradient of log(C / T).

        ``before`` and ``after`` are differences from the mean at both ends of a trajectory, ``(C, D)``, in units of the
        posterior, ``velocity`` that at its end; ``share`` is half of its length over the mean length. Lengths stay
        between one and a few hundred times ``step``.
        """
        before, after, velocity, weight = (each.double() for each in (before, after, velocity, acceptance))
        gain = after.square().sum(-1) - before.square().sum(-1)
        time = 2 * share * self.current
        new_slope = (weight * gain * (after * velocity).sum(-1)).mean().item() * time  # dC / d log T
        new_change = 0.25 * (weight * gain.square()).mean().item()
        if not (math.isfinite(new_slope) and math.isfinite(new_change)):
            return self
        updates = self.updates + 1
        slope = _MEMORY * self.slope + (1 - _MEMORY) * new_slope
        change = _MEMORY * self.change + (1 - _MEMORY) * new_change
        # of a long trajectory the slope is noise: bounded alone, without the cost, so that the cost still shortens it
        rise = min(max(slope / change, -3.0), 3.0) - 1.0 if change > 0 else 0.0  # d log(C / T) / d log T
        log_length = self.log_length + _RATE * rise
        log_length = min(max(log_length, math.log(step)), math.log(_MOST_STEPS * step))
        fresh = max(0.02, 1 / updates)
        averaged = (1 - fresh) * self.log_averaged + fresh * log_length
        return TrajectoryLength(log_length, averaged, slope, change, updates)


def running_mean(mean: Tensor, position: Tensor, number: int) -> Tensor:
    """Each chain's mean so far, over about its last hundred positions."""
    return mean + (position - mean) / min(number + 2, 100)


def halton(number: int) -> float:
    """The ``number``-th element of the van der Corput sequence in base 2, in (0, 1)."""
    value, share = 0.0, 0.5
    while number:
        value += share * (number & 1)
        number >>= 1
        share /= 2
    return value
