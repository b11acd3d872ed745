"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983): chains begin hot, draw at 1, and end cold at a mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, WarmUp
from knowable.core.chains.settings import ChainResult
from knowable.core.chains.target import Target
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_number
from knowable.core.support.randomness import generator_for
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.tempered_moves import Moves, MoveState, check_moves, moves_of

SCHEDULES = ("geometric", "linear", "logarithmic")
_COOLING = 0.7  # of the temperature, from one transition of the search for the mode to the next
_COLDEST = 1e-12


@dataclass(frozen=True, repr=False, kw_only=True)
class SimulatedAnnealing(Sampler):
    r"""Chains whose temperature falls from ``hottest`` to 1 in the warm-up, and copies of them that go on to 0.

    .. math:: p(\theta)^{1/T}, \qquad T_k = T_0^{1 - k/K} \text{ for } k = 0, \dots, K \text{ (geometric)}

    Hot chains cross between modes, and settle among them as they cool. At :math:`T = 1` they draw from the posterior,
    like any chain; where modes are so far apart that chains no longer cross at 1, R-hat says so, and
    :class:`TemperedChains` is the sampler to use. At the end a copy of the best position of every chain is cooled to
    :math:`T \to 0`, where all mass is at a mode: ``best`` holds the most probable parameters of all.

    Args:
        chains: Chains that advance together.
        draws: Draws kept of each chain, or None to go on until the chains have mixed.
        max_gradients: Where ``draws`` is None: gradients of each chain, warm-up included, after which the run ends even
            where the chains have not mixed; None is no limit.
        warmup: Transitions before the first draw, in which the sampler tunes itself; None is 800.
        start: Where the chains of a network begin: ``"ensemble"`` (one trained network each), ``"map"`` (one for all),
            ``"prior"`` (draws from it), ``"network"`` (its own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        storage: How draws are kept (:class:`~knowable.ChainStorage`): thinning, number format, memory, a file.
        hottest: First temperature :math:`T_0`. Barriers between modes become so many times lower.
        schedule: How the temperature falls in the first half of the warm-up: ``"geometric"``, ``"linear"`` or
            ``"logarithmic"`` (:math:`1/T_k` grows with :math:`\log(1 + k)`: Geman and Geman, 1984).
        moves: ``"hmc"`` or ``"metropolis"``, which needs no gradients.
        mass: Covariance that moves learn: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200
            dimensions).
        steps: Mean number of leapfrog steps, or number of random-walk steps, of a transition; None chooses.
        target_acceptance: Acceptance that steps are tuned to; None is 0.95, or 0.234 for random walks.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> def log_density(p):  # two modes, the one on the left a little higher
        ...     return -((p["x"] ** 2 - 1) ** 2).sum() - 0.2 * p["x"].sum()
        >>> samples = kn.SimulatedAnnealing().sample(log_density, {"x": torch.tensor([1.0])})
        >>> round(samples.best["x"].item(), 2)
        -1.02
    """

    family = "sampling"
    summary = "chains that cool down from a hot start; also finds the mode"
    aliases = ("annealing",)
    references = ("kirkpatrick1983",)

    hottest: float = 10.0
    schedule: str = "geometric"
    moves: str = "hmc"
    mass: str = "auto"
    steps: int | None = None
    target_acceptance: float | None = None

    default_warmup: ClassVar[int] = 800

    def __post_init__(self) -> None:
        super().__post_init__()
        check_moves(self)
        check_number("hottest", self.hottest, at_least=1)
        check_choice("schedule", self.schedule, SCHEDULES)

    def kernel(self, dimension: int) -> AnnealingKernel:
        """The transition."""
        return AnnealingKernel(moves_of(self, dimension, 1), self.hottest, self.schedule)

    def _best(self, target: Target, result: ChainResult) -> Params:
        if result.interrupted:  # no time to cool: the best that the chains came by
            return target.layout.views(result.state.best[int(result.state.best_value.argmax())])
        kernel = self.kernel(target.layout.size)
        generator = generator_for(0, "cooling", device=result.state.position.device)
        position, _ = kernel.cool(target, result.state, generator=generator)
        return target.layout.views(position)


def temperature_at(share: float, hottest: float, schedule: str, transitions: int) -> float:
    """Temperature when ``share`` of so many transitions of cooling are done: ``hottest`` at 0, and 1 at 1."""
    if schedule == "geometric":
        return hottest ** (1 - share)
    if schedule == "linear":
        return hottest + (1 - hottest) * share
    grown = math.log1p(share * transitions) / math.log1p(transitions)
    return hottest / (1 + (hottest - 1) * grown)


@dataclass(frozen=True)
class AnnealingState(MoveState):
    """The state of annealed chains: also their temperature, and the best position of every chain."""

    temperature: float
    best: Tensor
    best_value: Tensor


@dataclass(frozen=True)
class AnnealingKernel(Kernel):
    """Moves at a temperature that falls in the first half of the warm-up; every chain's best position is kept."""

    moves: Moves
    hottest: float
    schedule: str

    state_type = AnnealingState

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> AnnealingState:
        """Where the chains begin, before any tuning."""
        state = self.moves.init(target, position)
        return AnnealingState(**vars(state), temperature=1.0, best=position, best_value=state.value)

    def advance(
        self, target: Target, state: AnnealingState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[AnnealingState, Block]:
        """``n`` transitions of every chain."""
        found = []
        for i in target.in_time(n):
            number = 0 if warmup is None else warmup.first + i
            state = _at_temperature(state, self._temperature(number, warmup))
            heat = torch.full_like(state.value, state.temperature)
            state, info = self.moves.transition(target, state, heat, generator=generator, tuning=warmup is not None)
            if warmup is not None:
                state = self._learn(state, number, warmup.total)
            state = _with_best(state)
            found.append((state, info))
        return state, Block.stack(found)

    def tuned(self, state: AnnealingState) -> dict[str, float]:
        """Step size, in standard deviations of the posterior."""
        return {"step_size": state.log_scale.exp().item()}

    def cool(self, target: Target, state: AnnealingState, *, generator: torch.Generator) -> tuple[Tensor, float]:
        """Cool a copy of every chain's best position towards 0: the best of all ``(D,)``, and its log density.

        It ends where differences of the log density drown in rounding.
        """
        value, gradient = target.value_and_grad(state.best)
        kept = self.moves.kept_gradient(gradient)
        state = replace(state, position=state.best, value=value, gradient=kept, best_value=value)
        rounding = 4 * torch.finfo(value.dtype).eps * max(1.0, value.abs().max().item())
        transitions = 4 if kept is None else 1  # at one temperature: random walks are slower to follow
        temperature = 1.0
        while temperature > max(_COLDEST, rounding):
            temperature *= _COOLING
            state = _at_temperature(state, temperature)
            heat = torch.full_like(state.value, temperature)
            for _ in range(transitions):
                state = _with_best(self.moves.transition(target, state, heat, generator=generator)[0])
        winner = int(state.best_value.argmax())
        return state.best[winner], state.best_value[winner].item()

    def _temperature(self, number: int, warmup: WarmUp | None) -> float:
        length = 0 if warmup is None else warmup.total // 2
        if number >= length:
            return 1.0
        return temperature_at(number / length, self.hottest, self.schedule, length)

    def _learn(self, state: AnnealingState, number: int, total: int) -> AnnealingState:
        """The covariance is learned twice: roughly while it cools, and then at temperature 1."""
        length = total // 2
        if number < length:
            return self.moves.learn(state, number, length)
        if number == length:
            state = replace(state, window=self.moves.window(state.position))
        return self.moves.learn(state, number - length, total - length)


def _at_temperature(state: AnnealingState, temperature: float) -> AnnealingState:
    """The covariance is scaled with the temperature, as that of a normal is."""
    ratio = temperature / state.temperature
    return state if ratio == 1.0 else replace(state, factor=state.factor * math.sqrt(ratio), temperature=temperature)


def _with_best(state: AnnealingState) -> AnnealingState:
    better = state.value > state.best_value
    best = torch.where(better.unsqueeze(1), state.position, state.best)
    return replace(state, best=best, best_value=torch.where(better, state.value, state.best_value))
