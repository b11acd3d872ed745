"""Cyclical stochastic-gradient MCMC (Zhang, Li, Zhang, Chen and Wilson, 2020)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from knowable.core.chains.settings import ChainResult, Mixing
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count, check_number
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.sgld import SGLD, SGLDKernel, SGLDState
from knowable.inference.sampling.stochastic_gradient import Stage, check_settings, mass_for

_SEGMENT = 10  # steps of the same size


@dataclass(frozen=True, repr=False, kw_only=True)
class CyclicalSGMCMC(Sampler):
    r"""Langevin dynamics whose step falls along a cosine and rises again, so that each cycle can find another mode.

    .. math:: \epsilon(r) = \tfrac{\epsilon_0}{2} (\cos \pi r + 1), \qquad r \in (0, 1]

    In a cycle of L steps, the first ``proportion`` β of them explore with large steps. The others sample, and draws are
    taken from the second half of their time :math:`\tau = \sum \epsilon`, the last at the end of the cycle. All are
    steps of :class:`~knowable.SGLD`; their bias is made small by the falling step. A step size that is left open is
    tuned as SGLD's, and is that at the top of a cycle.

    In the paper explorations have no noise and climb towards a mode (``exploration_noise=0``). Then a draw at time t
    after their end has :math:`1 - e^{-t}` of the variance of a normal posterior of unit width (the default cycle has
    :math:`\tau \approx 4.5`), wide or bent posteriors need longer cycles, and modes weigh by how often they are reached
    and not by their mass. With noise, the default, explorations are themselves near the posterior.

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
        step_size: ε₀ at the top of a cycle, or None to tune it in the warm-up.
        steps: Steps of a transition in the warm-up.
        batch_size: Rows of a step, or None for all rows up to 1,024 and 128 beyond.
        mass: Σ of SGLD: ``"dense"``, ``"diagonal"`` or ``"identity"``; ``"auto"`` is dense up to 100 dimensions and
            diagonal beyond, and the identity where ``step_size`` is given.
        cycles: Cycles of each chain, or None to go on until the chains have mixed.
        cycle_steps: L.
        proportion: β.
        draws_per_cycle: Draws from each cycle.
        exploration_noise: Times the noise of SGLD that explorations have, from 0 to 1.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> sampler = kn.CyclicalSGMCMC(chains=4, cycles=20, cycle_steps=100, draws_per_cycle=2)
        >>> samples = sampler.sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([4, 40, 2])
    """

    family = "sampling"
    summary = "mini-batch chains whose step rises again and again, to visit several modes"
    aliases = ("csgmcmc",)
    references = ("zhang2020",)

    step_size: float | None = None
    steps: int = 10
    batch_size: int | None = None
    mass: str = "auto"
    cycles: int | None = None
    cycle_steps: int = 500
    proportion: float = 0.5
    draws_per_cycle: int = 3
    exploration_noise: float = 1.0

    mixing: ClassVar[Mixing] = Mixing(first=60, most=1920)
    network_mixing: ClassVar[Mixing] = Mixing(rhat=1.05, ess=200.0, first=60, most=240)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)
        if self.cycles is not None:
            check_count("cycles", self.cycles)
        check_count("draws_per_cycle", self.draws_per_cycle)
        check_count("cycle_steps", self.cycle_steps, at_least=4 * self.draws_per_cycle)
        check_number("exploration_noise", self.exploration_noise, at_least=0, at_most=1)
        check_number("proportion", self.proportion, at_least=0, at_most=0.9)

    def kernel(self, dimension: int) -> SGLDKernel:
        """The transition."""
        plain = SGLD(
            step_size=self.step_size, steps=self.steps, batch_size=self.batch_size, temperature=self.temperature
        )
        return SGLDKernel(plain, mass_for(self, dimension), partial(cycle_steps, self))

    def _run(self, target: Target, start: Tensor, **options: Any) -> ChainResult:
        if self.cycles is None or self.draws is not None:
            return super()._run(target, start, **options)
        return replace(self, draws=self.cycles * self.draws_per_cycle)._run(target, start, **options)


def cycle_steps(sampler: CyclicalSGMCMC, state: SGLDState) -> list[Stage]:
    """Pieces of the cycle up to the next draw, or through the exploration of the next cycle to its first draw."""
    number = state.drawn % sampler.draws_per_cycle
    stops, sampling_from = draw_stops(sampler), exploration_steps(sampler)
    stages = []
    for a, b in _segments(0 if number == 0 else stops[number - 1], stops[number], sampling_from):
        noise = 1.0 if a >= sampling_from else sampler.exploration_noise
        stages.append((b - a, height((a + b) / 2 / sampler.cycle_steps), noise))
    return stages


def height(r: float) -> float:
    """The step at a part ``r`` of the cycle, over that at its top."""
    return 0.5 * (math.cos(math.pi * r) + 1)


def exploration_steps(cycle: CyclicalSGMCMC) -> int:
    """Steps of a cycle that explore."""
    return round(cycle.proportion * cycle.cycle_steps)


def draw_stops(cycle: CyclicalSGMCMC) -> list[int]:
    """After which steps of a cycle draws are taken: evenly over the second half of the sampling stage's time."""
    total, first = cycle.cycle_steps, exploration_steps(cycle)
    times = [height((k + 0.5) / total) for k in range(first, total)]
    whole, passed, stops = sum(times), 0.0, []
    for k, time in enumerate(times):
        passed += time
        share = 0.5 * (1 + len(stops) / max(1, cycle.draws_per_cycle - 1))
        if len(stops) < cycle.draws_per_cycle - 1 and passed >= share * whole:
            stops.append(first + k + 1)
    return [*stops, total]


def _segments(first: int, last: int, sampling_from: int) -> list[tuple[int, int]]:
    """Steps ``first`` to ``last`` in pieces of at most ten, each wholly before ``sampling_from`` or wholly after."""
    found = []
    while first < last:
        end = min(first + _SEGMENT, last, sampling_from if first < sampling_from else last)
        found.append((first, end))
        first = end
    return found
