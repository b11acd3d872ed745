"""Microcanonical Langevin Monte Carlo (Robnik et al., 2023), and its Metropolis-adjusted form (Robnik et al., 2025)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Gradient
from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.mixing import ess_mean
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_number, check_type
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling import step_size as steps
from knowable.inference.sampling import trajectory_length as lengths
from knowable.inference.sampling.hmc import CAREFUL_EVERY, CAREFULLY, DIVERGED
from knowable.inference.sampling.metric import Metric, pull, spread
from knowable.inference.sampling.tuning import TunedSampler, begin, sensible_step

# --- The flow of microcanonical dynamics: constant speed, turned by the gradient (Ver Steeg and Galstyan, 2021) ------
#
# A step is B(λ) A(½) B(1-2λ) A(½) B(λ) (McLachlan, 1995; minimal error for two gradients): A moves along the direction,
# B
# turns it. Turning by a gradient g = ∇ log p over a time ε is exact: with e = g/|g| and δ = ε|g| / (d-1)
#
# .. math:: u' \propto e\,(1-\zeta)\,(1 + \zeta + (e \cdot u)(1-\zeta)) + 2\zeta u, \qquad \zeta = e^{-\delta}
#
# and the kinetic energy changes by :math:`(d-1)(\delta - \log 2 + \log(1 + e\cdot u + (1 - e\cdot u)\zeta^2))`. Few
# dimensions are filled up with independent standard normals that nobody sees, for a direction needs room to turn.

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


# Microcanonical Langevin Monte Carlo (Robnik et al., 2023), and its Metropolis-adjusted form (Robnik et al.,
# 2025) ---------------------------------------------------------------------------------------------------------------

_MOST_STEPS = 500
_STRETCH = 0.25  # of the length, between two draws: ever closer draws say ever less that is new
_NUMBERS = 2**20  # random numbers drawn at once
_WATCHED = 32  # coordinates whose correlation in time is measured


@dataclass(frozen=True, repr=False)
class MCLMC(TunedSampler):
    r"""Chains that move at constant speed and are only turned by the gradient.

    .. math:: \dot\theta = u, \qquad \dot u = \frac{1}{D - 1} (I - u u^\top) \nabla \log p(D, \theta), \qquad \|u\| = 1

    The velocity's direction is partly renewed along the way. The energy is conserved by the exact dynamics, and its
    error says how well the step follows it.

    With ``adjusted=True`` whole trajectories are accepted or rejected, which makes the draws exact; their length is
    tuned as in :class:`~knowable.inference.sampling.hmc.HMC`, and every fifth has smaller steps, so that no chain is
    stuck for long. With ``adjusted=False`` nothing is rejected: a gradient
    moves a chain further, above all in many dimensions, at the price of a small bias that ``energy_variance`` sets
    (the variance of the energy error of a step, for each dimension). Started from a deep ensemble, which is the
    default for networks, this is the recipe of Sommer et al. (2025).

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        step_size: Step in units of the posterior, or None to tune it.
        mass: ``"diagonal"``, ``"dense"``, ``"identity"``, or ``"auto"``: dense up to 100 dimensions, diagonal beyond.
        target_acceptance: Where adjusted: acceptance probability the step size is tuned to.
        adjusted: Whether a Metropolis test makes the draws exact.
        length: Distance, in units of the posterior, after which the direction is forgotten, or None to tune it.
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

    target_acceptance: float = 0.9
    adjusted: bool = True
    length: float | None = None
    energy_variance: float = 5e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("adjusted", self.adjusted, bool, "True or False")
        if self.length is not None:
            check_number("length", self.length, above=0)
        check_number("energy_variance", self.energy_variance, above=0)

    def kernel(self, dimension: int) -> MCLMCKernel:
        """The transition."""
        return MCLMCKernel(self, self.mass_for(dimension))


@dataclass(frozen=True)
class MCLMCKernel(Kernel):
    """Stretches of the same number of steps for all chains: accepted or rejected as a whole, or kept as they are."""

    settings: MCLMC
    mass: str
    flow: Isokinetic = field(default_factory=Isokinetic)

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin, before any tuning."""
        state = begin(target, position, self.settings, generator=generator)
        extra = torch.randn(
            (len(position), self.flow.extra(position.shape[1])), generator=generator, dtype=position.dtype,
            device=position.device,
        )  # fmt: skip
        dimension = position.shape[1] + extra.shape[1]
        first = self.settings.step_size
        if first is None:  # speed is 1 here, and about √D with momenta
            first = 0.5 * sensible_step(target, state, generator) * math.sqrt(dimension)
        return {
            **state,
            "extra": extra,
            "direction": unit(_noise(position, dimension, generator)),
            "step": steps.begin(first),
            "length": lengths.begin(self.settings.length or max(4 * first, min(math.sqrt(dimension), 50 * first))),
            "energy": torch.tensor([0.0, 0.0, first], dtype=torch.float64),
            "centre": position.clone(),
            "transitions": torch.zeros((), dtype=torch.int64),
        }

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` stretches of every chain."""
        state = dict(state)
        found = []
        metric = Metric(state["inverse_mass"])
        for i in target.in_time(n):
            transition = self._adjusted if self.settings.adjusted else self._unadjusted
            number = warmup.first + i if warmup is not None and steps.tunes(warmup) else None
            found.append(transition(target, state, metric, generator, number))
            state["transitions"] = state["transitions"] + 1
            before, here = state["inverse_mass"], state["position"].unsqueeze(0)
            if warmup is not None and metrics.learn(state, self.mass, here, warmup.first + i, warmup.total):
                metric = Metric(state["inverse_mass"])
                self._start_again(state, metrics.relative(state["inverse_mass"], before))
        block = Block.stack(found)
        if warmup is not None and not self.settings.adjusted and self.settings.length is None:
            self._learn_length(state, block.positions, warmup)
        return state, block

    def tuned(self, state: State) -> dict[str, float]:
        """Step size and the steps of a stretch."""
        step = self._step(state, tuning=False)
        length = self.settings.length or lengths.length(state["length"], tuning=False)
        return {"step_size": step, "length_steps": float(max(1, round(length / step)))}

    def _step(self, state: State, *, tuning: bool) -> float:
        if self.settings.step_size is not None:
            return self.settings.step_size
        if not self.settings.adjusted:
            return state["energy"][2].item()
        return steps.current(state["step"]) if tuning else steps.final(state["step"])

    # --- with a Metropolis test --------------------------------------------------------------------------------------

    def _adjusted(self, target: Target, state: State, metric: Metric, generator: torch.Generator, number: int | None):
        tuning = number is not None
        share = lengths.halton(int(state["transitions"]) + 1)
        step = self._step(state, tuning=tuning)
        length = self.settings.length or lengths.length(state["length"], tuning=tuning)
        count = max(1, min(_MOST_STEPS, math.ceil(2 * share * length / step)))
        if not tuning and self.settings.step_size is None and int(state["transitions"]) % CAREFUL_EVERY == 0:
            step = step * CAREFULLY  # so that no chain is stuck for long where the density is narrow
        walk = Walk.of(state, unit(_noise(state["position"], state["direction"].shape[1], generator)))
        end = self.flow.run(target, metric, walk, step, count)
        change = end.energy  # ΔE of the whole trajectory
        good = torch.isfinite(change) & torch.isfinite(end.gradient).all(-1)
        acceptance = torch.where(good, (-change).clamp_max(0.0).exp(), 0.0)
        uniform = torch.rand(len(change), generator=generator, dtype=change.dtype, device=change.device)
        taken = uniform < acceptance
        if tuning:
            self._tune(state, end, metric, acceptance, good, share, number or 0)
        for name, new in (("position", end.position), ("gradient", end.gradient), ("extra", end.extra)):
            state[name] = torch.where(taken.unsqueeze(-1), new, state[name])
        state["value"] = torch.where(taken, end.value, state["value"])
        info = {
            "acceptance": acceptance, "diverging": (~good).to(change), "energy": torch.where(good, change, 0.0),
            "steps": torch.full_like(acceptance, 2 * count),
        }  # fmt: skip
        return state["position"], state["value"], info

    def _tune(
        self, state: State, end: Walk, metric: Metric, acceptance: Tensor, good: Tensor, share: float, number: int
    ) -> None:  # fmt: skip
        if self.settings.step_size is None:
            state["step"] = steps.update(state["step"], [acceptance.mean().item()], self.settings.target_acceptance)
        if self.settings.length is None:
            before = metric.whiten(state["position"] - state["centre"])
            after = torch.where(good.unsqueeze(-1), metric.whiten(end.position - state["centre"]), before)
            velocity = torch.where(good.unsqueeze(-1), end.direction[:, : before.shape[1]], 0.0)
            state["length"] = lengths.update(
                state["length"], before, after, velocity, acceptance, share=share, step=steps.current(state["step"])
            )
        state["centre"] = lengths.running_mean(state["centre"], state["position"], number)

    # --- without ------------------------------------------------------------------------------------------------------

    def _unadjusted(self, target: Target, state: State, metric: Metric, generator: torch.Generator, number: int | None):
        tuning = number is not None
        length = self.settings.length or lengths.length(state["length"], tuning=tuning)
        count = self._stretch(state, length, tuning=tuning)
        walk = Walk.of(state, state["direction"])
        worst = torch.zeros_like(state["value"])
        fused = FusedStep(target, langevin_step, gradients=2)
        for noise in _noises(count, walk.direction, generator):
            step = self._step(state, tuning=tuning)
            walk, change, good = self.flow.langevin(fused, metric, walk, step, length, noise)
            worst = torch.maximum(worst, (~good).to(worst))
            if tuning and self.settings.step_size is None:
                state["energy"] = _energy_step(
                    state["energy"], change[good], walk.direction.shape[1] * self.settings.energy_variance
                )
        state |= {
            "position": walk.position, "gradient": walk.gradient, "extra": walk.extra, "value": walk.value,
            "direction": walk.direction,
        }  # fmt: skip
        info = {"diverging": worst, "energy": walk.energy, "steps": torch.full_like(worst, 2 * count)}
        return walk.position, walk.value, info

    def _stretch(self, state: State, length: float, *, tuning: bool) -> int:
        """Steps between two draws: over a part of the length, for draws need not be independent."""
        return max(1, min(_MOST_STEPS, round(_STRETCH * length / self._step(state, tuning=tuning))))

    def _learn_length(self, state: State, positions: Tensor, warmup: WarmUp) -> None:
        """Forget the direction after a fixed part of the time in which positions stay correlated."""
        dimension = state["direction"].shape[1]
        step, n = self._step(state, tuning=True), len(positions)
        if warmup.first + n <= metrics.window_opens(warmup.total) or n < 20:
            state["length"] = lengths.begin(max(2 * step, min(math.sqrt(dimension), 200 * step)))
            return
        before = lengths.length(state["length"], tuning=False)
        every = max(1, positions.shape[2] // _WATCHED)
        some = positions[..., ::every].transpose(0, 1)
        effective = ess_mean(some)
        share = effective[~effective.isnan()].mean().item() / (some.shape[0] * some.shape[1])
        if math.isfinite(share) and share > 0:  # positions stay correlated over τ = (distance of two draws) / share
            apart = step * self._stretch(state, before, tuning=True)
            wanted = min(max(0.4 * apart / share, 0.5 * before, 2 * step), 2 * before, _MOST_STEPS * step)
            state["length"] = lengths.begin(wanted)

    def _start_again(self, state: State, scale: float) -> None:
        """Step and length in the units of a new metric, which are ``scale`` times as long."""
        step = self._step(state, tuning=True) / scale
        state["step"] = steps.begin(step, boldness=2.0)
        state["energy"] = torch.tensor([0.0, 0.0, step], dtype=torch.float64)
        length = lengths.length(state["length"], tuning=True) / scale
        state["length"] = lengths.begin(max(length, 2 * step))


def _energy_step(state: Tensor, change: Tensor, target: float) -> Tensor:
    r"""The step at which the energy error has the wanted variance, from a fading memory of errors.

    The variance grows as the sixth power of the step, so that
    :math:`\epsilon = (\overline{\Delta E^2 / (v \epsilon^6)})^{-1/6}`.
    """
    total, weights, step = state.tolist()
    if len(change) == 0:
        return torch.tensor([total, weights, step / 2], dtype=torch.float64)
    ratio = change.double().square() / target + 1e-8
    weight = (-0.5 * (ratio.log() / 9.0).square()).exp()
    fade = 1 - 1 / 50
    total = fade * total + (weight * ratio).mean().item() / step**6
    weights = fade * weights + weight.mean().item()
    found = (total / weights) ** (-1 / 6) if total > 0 else step
    return torch.tensor([total, weights, min(max(found, step / 1.5), 1.5 * step)], dtype=torch.float64)


def _noises(count: int, like: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """``count`` times standard normal numbers shaped like ``like``, drawn many at once."""
    together = max(1, _NUMBERS // like.numel())
    for first in range(0, count, together):
        shape = (min(together, count - first), *like.shape)
        yield from torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def _noise(position: Tensor, dimension: int, generator: torch.Generator) -> Tensor:
    shape = (len(position), dimension)
    return torch.randn(shape, generator=generator, dtype=position.dtype, device=position.device)
