"""Microcanonical Langevin Monte Carlo (Robnik et al., 2023), and its Metropolis-adjusted form (Robnik et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.chains.convergence import ess_mean
from knowable.core.chains.fused_step import FusedStep, Gradient
from knowable.core.chains.kernel import Block, Info, Kernel, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_number, check_type
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling.hmc import (
    DIVERGED,
    SMALL_STEP,
    SMALL_STEP_EVERY,
    TrajectoryLength,
    halton,
    running_mean,
)
from knowable.inference.sampling.metric import Metric, MetricState, pull, spread
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.tuning import (
    DualAveraging,
    begin,
    check_tuning,
    initial_step_size,
    tunes,
    tunes_at_modes,
)

_MOST_STEPS = 500
_DRAW_SPACING = 0.25  # of the length, between two draws: closer draws add little information
_NUMBERS = 2**20  # random numbers drawn at once
_MONITORED = 32  # coordinates whose autocorrelation is measured


@dataclass(frozen=True, repr=False, kw_only=True)
class MCLMC(Sampler):
    r"""Chains that move at constant speed and are only turned by the gradient.

    .. math:: \dot\theta = u, \qquad \dot u = \frac{1}{D - 1} (I - u u^\top) \nabla \log p(D, \theta), \qquad \|u\| = 1

    The velocity's direction is partly renewed along the way. The energy is conserved by the exact dynamics, and its
    error says how well the step follows it.

    With ``adjusted=True`` whole trajectories are accepted or rejected, which makes the draws exact; their length is
    tuned as in :class:`~knowable.inference.sampling.hmc.HMC`, and every fifth has smaller steps, so that no chain is
    stuck for long. With ``adjusted=False`` nothing is rejected: a gradient moves a chain further, above all in many
    dimensions, at the price of a small bias that ``energy_variance`` sets (the variance of the energy error of a step,
    for each dimension). Started from a deep ensemble, which is the
    default for networks, this is the recipe of Sommer et al. (2025).

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
        step_size: Step in units of the posterior, or None to tune it.
        mass: ``"diagonal"``, ``"dense"``, ``"identity"``, or ``"auto"``: dense up to 100 dimensions, diagonal beyond.
        target_acceptance: Where adjusted: acceptance probability the step size is tuned to.
        adjusted: Whether a Metropolis test makes the draws exact.
        length: Distance, in units of the posterior, after which the direction has decorrelated, or None to tune it.
        energy_variance: Where not adjusted: variance of the energy error for each dimension that the step is tuned to.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.MCLMC(chains=4, draws=100).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([4, 100, 2])
    """

    family = "sampling"
    summary = "microcanonical chains from a deep ensemble: the most draws for a gradient"
    aliases = ("mile",)
    references = ("robnik2023", "robnik2025", "sommer2025")

    step_size: float | None = None
    mass: str = "auto"
    target_acceptance: float = 0.9
    adjusted: bool = True
    length: float | None = None
    energy_variance: float = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tuning(self)
        check_type("adjusted", self.adjusted, bool, "True or False")
        if self.length is not None:
            check_number("length", self.length, above=0)
        check_number("energy_variance", self.energy_variance, above=0)

    def kernel(self, dimension: int) -> MCLMCKernel:
        """The transition."""
        return MCLMCKernel(self, metrics.kind_for(self.mass, dimension))

    begins_near_modes = tunes_at_modes


@dataclass(frozen=True)
class EnergyStep:
    """A step size that is tuned by the variance of its energy error."""

    total: float  # weighted sum of ΔE² / ε⁶ over the wanted variance, exponentially fading
    weights: float  # sum of the weights
    step: float  # the step size ε

    def update(self, change: Tensor, target: float) -> EnergyStep:
        r"""With the energy errors of one step: the step size at which they have the variance ``target``.

        The variance grows as the sixth power of the step, so that
        :math:`\epsilon = (\overline{\Delta E^2 / (v \epsilon^6)})^{-1/6}`.
        """
        step = self.step
        if len(change) == 0:
            return replace(self, step=step / 2)
        ratio = change.double().square() / target + 1e-8
        weight = (-0.5 * (ratio.log() / 9.0).square()).exp()
        fade = 1 - 1 / 50
        total = fade * self.total + (weight * ratio).mean().item() / step**6
        weights = fade * self.weights + weight.mean().item()
        found = (total / weights) ** (-1 / 6) if total > 0 else step
        return EnergyStep(total, weights, min(max(found, step / 1.5), 1.5 * step))


@dataclass(frozen=True)
class MCLMCState(MetricState):
    """The state of MCLMC."""

    extra: Tensor  # unseen coordinates, (C, E)
    direction: Tensor  # unit vectors (C, D + E) in units of the posterior
    step: DualAveraging  # the step size, where adjusted
    energy: EnergyStep  # the step size, where not adjusted
    length: TrajectoryLength  # length of a trajectory, or after which the direction has decorrelated
    centre: Tensor  # running mean of every chain's positions, (C, D)
    transitions: int = 0  # made so far, warm-up included


@dataclass(frozen=True)
class MCLMCKernel(Kernel):
    """The same number of steps for all chains: accepted or rejected as a whole, or kept as they are."""

    settings: MCLMC
    mass: str

    state_type = MCLMCState

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> MCLMCState:
        """Where the chains begin, before any tuning."""
        common = begin(target, position, self.settings, self.mass, generator=generator)
        extra = _noise(position, max(0, _LEAST_DIMENSIONS - position.shape[1]), generator)
        dimension = position.shape[1] + extra.shape[1]
        first = self.settings.step_size
        if first is None:  # speed is 1 here, and about √D with momenta
            metric = Metric(common["inverse_mass"])
            first = 0.5 * initial_step_size(target, position, metric, generator=generator) * math.sqrt(dimension)
        length = self.settings.length or max(4 * first, min(math.sqrt(dimension), 50 * first))
        return MCLMCState(
            **common, extra=extra, direction=unit(_noise(position, dimension, generator)),
            step=DualAveraging.begin(first), energy=EnergyStep(0.0, 0.0, first), length=TrajectoryLength.begin(length),
            centre=position.clone(),
        )  # fmt: skip

    def advance(
        self, target: Target, state: MCLMCState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[MCLMCState, Block]:
        """``n`` transitions of every chain."""
        found = []
        metric = Metric(state.inverse_mass)
        transition = self._adjusted if self.settings.adjusted else self._unadjusted
        for i in target.in_time(n):
            number = warmup.first + i if warmup is not None and tunes(warmup) else None
            before = state.inverse_mass
            state, info = transition(target, state, metric, generator, number)
            state = replace(state, transitions=state.transitions + 1)
            found.append((state, info))
            if warmup is not None:
                here = state.position.unsqueeze(0)
                state = metrics.learn(state, self.mass, here, warmup.first + i, warmup.total)
            if state.inverse_mass is not before:
                metric = Metric(state.inverse_mass)
                state = self._restart(state, metrics.relative(state.inverse_mass, before))
        block = Block.stack(found)
        if warmup is not None and not self.settings.adjusted and self.settings.length is None:
            state = replace(state, length=self._learned_length(state, block.positions, warmup))
        return state, block

    def tuned(self, state: MCLMCState) -> dict[str, float]:
        """Step size and the steps of a length."""
        step = self._step(state, tuning=False)
        length = self.settings.length or state.length.final
        return {"step_size": step, "length_steps": float(max(1, round(length / step)))}

    def _step(self, state: MCLMCState, *, tuning: bool) -> float:
        if self.settings.step_size is not None:
            return self.settings.step_size
        if not self.settings.adjusted:
            return state.energy.step
        return state.step.current if tuning else state.step.final

    def _length(self, state: MCLMCState, *, tuning: bool) -> float:
        return self.settings.length or (state.length.current if tuning else state.length.final)

    # --- with a Metropolis test --------------------------------------------------------------------------------------

    def _adjusted(
        self, target: Target, state: MCLMCState, metric: Metric, generator: torch.Generator, number: int | None
    ) -> tuple[MCLMCState, Info]:
        tuning = number is not None
        share = halton(state.transitions + 1)
        step = self._step(state, tuning=tuning)
        count = max(1, min(_MOST_STEPS, math.ceil(2 * share * self._length(state, tuning=tuning) / step)))
        if not tuning and self.settings.step_size is None and state.transitions % SMALL_STEP_EVERY == 0:
            step = step * SMALL_STEP  # so that no chain is stuck for long where the density is narrow
        walk = Walk.of(state, unit(_noise(state.position, state.direction.shape[1], generator)))
        end = isokinetic_walk(target, metric, walk, step, count)
        change = end.energy  # ΔE of the whole trajectory
        good = torch.isfinite(change) & torch.isfinite(end.gradient).all(-1)
        acceptance = torch.where(good, (-change).clamp_max(0.0).exp(), 0.0)
        uniform = torch.rand(len(change), generator=generator, dtype=change.dtype, device=change.device)
        accepted = uniform < acceptance
        wide = accepted.unsqueeze(-1)
        if number is not None:
            state = self._tuned_state(state, end, metric, acceptance, good, share, number)
        state = replace(
            state,
            position=torch.where(wide, end.position, state.position),
            gradient=torch.where(wide, end.gradient, state.gradient),
            extra=torch.where(wide, end.extra, state.extra),
            value=torch.where(accepted, end.value, state.value),
        )
        energy, steps = torch.where(good, change, 0.0), torch.full_like(acceptance, 2 * count)
        return state, Info(acceptance, (~good).to(change), energy, steps)

    def _tuned_state(
        self, state: MCLMCState, end: Walk, metric: Metric, acceptance: Tensor, good: Tensor, share: float, number: int
    ) -> MCLMCState:  # fmt: skip
        step, length = state.step, state.length
        if self.settings.step_size is None:
            step = step.update([acceptance.mean().item()], self.settings.target_acceptance)
        if self.settings.length is None:
            before = metric.whiten(state.position - state.centre)
            after = torch.where(good.unsqueeze(-1), metric.whiten(end.position - state.centre), before)
            velocity = torch.where(good.unsqueeze(-1), end.direction[:, : before.shape[1]], 0.0)
            length = length.update(before, after, velocity, acceptance, share=share, step=step.current)
        centre = running_mean(state.centre, state.position, number)
        return replace(state, step=step, length=length, centre=centre)

    # --- without ------------------------------------------------------------------------------------------------------

    def _unadjusted(
        self, target: Target, state: MCLMCState, metric: Metric, generator: torch.Generator, number: int | None
    ) -> tuple[MCLMCState, Info]:
        tuning = number is not None
        length = self._length(state, tuning=tuning)
        count = self._steps_between_draws(state, length, tuning=tuning)
        walk = Walk.of(state, state.direction)
        diverging = torch.zeros_like(state.value)
        fused = FusedStep(target, langevin_step, gradients=2)
        for noise in _noises(count, walk.direction, generator):
            step = self._step(state, tuning=tuning)
            walk, change, good = isokinetic_langevin(fused, metric, walk, step, length, noise)
            diverging = torch.maximum(diverging, (~good).to(diverging))
            if tuning and self.settings.step_size is None:
                wanted = walk.direction.shape[1] * self.settings.energy_variance
                state = replace(state, energy=state.energy.update(change[good], wanted))
        state = replace(
            state, position=walk.position, gradient=walk.gradient, extra=walk.extra, value=walk.value,
            direction=walk.direction,
        )  # fmt: skip
        return state, Info(diverging=diverging, energy=walk.energy, steps=torch.full_like(diverging, 2 * count))

    def _steps_between_draws(self, state: MCLMCState, length: float, *, tuning: bool) -> int:
        """Over a part of the length, for draws need not be independent."""
        return max(1, min(_MOST_STEPS, round(_DRAW_SPACING * length / self._step(state, tuning=tuning))))

    def _learned_length(self, state: MCLMCState, positions: Tensor, warmup: WarmUp) -> TrajectoryLength:
        """A fixed part of the time over which positions stay correlated."""
        dimension = state.direction.shape[1]
        step, n = self._step(state, tuning=True), len(positions)
        if warmup.first + n <= metrics.window_opens(warmup.total) or n < 20:
            return TrajectoryLength.begin(max(2 * step, min(math.sqrt(dimension), 200 * step)))
        before = state.length.final
        every = max(1, positions.shape[2] // _MONITORED)
        some = positions[..., ::every].transpose(0, 1)
        effective = ess_mean(some)
        share = effective[~effective.isnan()].mean().item() / (some.shape[0] * some.shape[1])
        if not (math.isfinite(share) and share > 0):
            return state.length
        apart = step * self._steps_between_draws(state, before, tuning=True)  # positions correlate over apart / share
        wanted = min(max(0.4 * apart / share, 0.5 * before, 2 * step), 2 * before, _MOST_STEPS * step)
        return TrajectoryLength.begin(wanted)

    def _restart(self, state: MCLMCState, scale: float) -> MCLMCState:
        """Step size and length in the units of a new mass matrix, which are ``scale`` times as long."""
        step = self._step(state, tuning=True) / scale
        length = TrajectoryLength.begin(max(state.length.current / scale, 2 * step))
        energy = EnergyStep(0.0, 0.0, step)
        return replace(state, step=DualAveraging.begin(step, initial_factor=2.0), energy=energy, length=length)


def _noises(count: int, like: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """``count`` times standard normal numbers shaped like ``like``, drawn many at once."""
    together = max(1, _NUMBERS // like.numel())
    for first in range(0, count, together):
        shape = (min(together, count - first), *like.shape)
        yield from torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _noise(position: Tensor, dimension: int, generator: torch.Generator) -> Tensor:
    shape = (len(position), dimension)
    return torch.randn(shape, generator=generator, dtype=position.dtype, device=position.device)


# --- the flow of microcanonical dynamics: constant speed, turned by the gradient (Ver Steeg and Galstyan, 2021) ------
#
# A step is B(λ) A(½) B(1-2λ) A(½) B(λ) (McLachlan, 1995; minimal error for two gradients): A moves along the direction,
# B turns it. Turning by a gradient g = ∇ log p over a time ε is exact: with e = g/|g| and δ = ε|g| / (d-1)
#
# .. math:: u' \propto e\,(1-\zeta)\,(1 + \zeta + (e \cdot u)(1-\zeta)) + 2\zeta u, \qquad \zeta = e^{-\delta}
#
# and the kinetic energy changes by :math:`(d-1)(\delta - \log 2 + \log(1 + e\cdot u + (1 - e\cdot u)\zeta^2))`. Few
# dimensions are filled up with independent standard normals that nobody sees, for a direction needs room to turn.

_LAMBDA = 0.1931833275037836
_LEAST_DIMENSIONS = 4


@dataclass(frozen=True)
class Walk:
    """Where all chains are on their way."""

    position: Tensor  # (C, D)
    extra: Tensor  # unseen coordinates that fill up few dimensions, (C, E)
    direction: Tensor  # unit vectors (C, D + E) in units of the posterior
    value: Tensor  # log densities (C,)
    gradient: Tensor  # their gradients (C, D)
    energy: Tensor  # change of energy since the walk began, (C,)

    @classmethod
    def of(cls, state: MCLMCState, direction: Tensor) -> Walk:
        """The beginning of a walk."""
        energy = torch.zeros_like(state.value)
        return cls(state.position, state.extra, direction, state.value, state.gradient, energy)


def isokinetic_walk(target: Target, metric: Metric, walk: Walk, step: float, count: int) -> Walk:
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


def isokinetic_langevin(
    fused: FusedStep, metric: Metric, walk: Walk, step: float, length: float, noise: Tensor
) -> tuple[Walk, Tensor, Tensor]:
    """One :func:`langevin_step` after which directions are refreshed in part, to decorrelate over ``length``.

    Returns also the change of energy ``(C,)``, and whether the step was possible ``(C,)``; where it was not, a chain
    stays and faces the other way.
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
