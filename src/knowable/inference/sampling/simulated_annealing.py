"""Simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983): chains begin hot, draw at 1, and end cold at a mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.settings import ChainResult
from knowable.core.chains.target import Target
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_number
from knowable.core.support.randomness import generator_for
from knowable.inference.sampling import warmup_covariance as spread
from knowable.inference.sampling.moves import MovedSampler, Moves

SCHEDULES = ("geometric", "linear", "logarithmic")
_COOLING = 0.7  # of the temperature, from one transition of the search for the mode to the next
_COLDEST = 1e-12


@dataclass(frozen=True, repr=False)
class SimulatedAnnealing(MovedSampler):
    r"""Chains whose temperature falls from ``hottest`` to 1 in the warm-up, and copies of them that go on to 0.

    .. math:: p(\theta)^{1/T}, \qquad T_k = T_0^{1 - k/K} \text{ for } k = 0, \dots, K \text{ (geometric)}

    Hot chains cross between modes, and settle among them as they cool. At :math:`T = 1` they draw from the posterior,
    like any chain; where modes are so far apart that chains no longer cross at 1, R-hat says so, and
    :class:`TemperedChains` is the sampler to use. At the end a copy of the best position of every chain is cooled to
    :math:`T \to 0`, where all mass is at a mode: ``best`` holds the most probable parameters of all.

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        hottest: First temperature :math:`T_0`. Barriers between modes become so many times lower.
        schedule: How the temperature falls in the first half of the warm-up: ``"geometric"``, ``"linear"`` or
            ``"logarithmic"`` (:math:`1/T_k` grows with :math:`\log(1 + k)`: Geman and Geman, 1984).
        moves: ``"hmc"`` or ``"metropolis"``, which needs no gradients.
        mass: What moves learn of the posterior's shape: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200
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

    default_warmup: ClassVar[int] = 800

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("hottest", self.hottest, at_least=1)
        check_choice("schedule", self.schedule, SCHEDULES)

    def kernel(self, dimension: int) -> AnnealingKernel:
        """The transition."""
        return AnnealingKernel(self.moves_for(dimension, 1), self.hottest, self.schedule)

    def _best(self, target: Target, result: ChainResult) -> Params:
        if result.interrupted:  # no time to cool: the best that the chains came by
            return target.layout.views(result.state["best"][int(result.state["best_value"].argmax())])
        kernel = self.kernel(target.layout.size)
        position, _ = kernel.cool(
            target, result.state, generator=generator_for(0, "cooling", device=result.draws.device)
        )
        return target.layout.views(position)


def temperature_at(share: float, hottest: float, schedule: str, transitions: int) -> float:
    """Temperature when ``share`` of so many transitions of cooling are done: ``hottest`` at 0, and 1 at 1.

    Args:
        share: From 0 to 1.
        hottest: The first temperature.
        schedule: One of ``SCHEDULES``.
        transitions: Length of the cooling, which the logarithm depends on.
    """
    if schedule == "geometric":
        return hottest ** (1 - share)
    if schedule == "linear":
        return hottest + (1 - hottest) * share
    grown = math.log1p(share * transitions) / math.log1p(transitions)
    return hottest / (1 + (hottest - 1) * grown)


@dataclass(frozen=True)
class AnnealingKernel(Kernel):
    """Moves at a temperature that falls in the first half of the warm-up, and a memory of the best position."""

    moves: Moves
    hottest: float
    schedule: str

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin, before any tuning."""
        state = self.moves.init(target, position)
        state["temperature"] = torch.ones((), dtype=torch.float64)
        return state | {"best": position.clone(), "best_value": state["value"].clone()}

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` transitions of every chain."""
        state, found = dict(state), []
        for i in target.in_time(n):
            number = 0 if warmup is None else warmup.first + i
            _change_temperature(state, self._temperature(number, warmup))
            heat = torch.full_like(state["value"], state["temperature"].item())
            info = self.moves.transition(target, state, heat, generator=generator, tuning=warmup is not None)
            if warmup is not None:
                self._learn(state, number, warmup.total)
            _remember_best(state)
            found.append((state["position"], state["value"], info))
        return state, Block.stack(found)

    def tuned(self, state: State) -> dict[str, float]:
        """Scale of the steps, in units of the posterior's spread."""
        return {"step_size": state["log_scale"].exp().item()}

    def cool(self, target: Target, state: State, *, generator: torch.Generator) -> tuple[Tensor, float]:
        """Cool a copy of every chain's best position towards 0: the best of all ``(D,)``, and its log density.

        It ends where differences of the log density drown in rounding.
        """
        state = self._at_best(target, state)
        rounding = 4 * torch.finfo(state["value"].dtype).eps * max(1.0, state["best_value"].abs().max().item())
        temperature = 1.0
        while temperature > max(_COLDEST, rounding):
            temperature *= _COOLING
            _change_temperature(state, temperature)
            heat = torch.full_like(state["value"], temperature)
            for _ in range(self._cooling_moves(state)):
                self.moves.transition(target, state, heat, generator=generator)
                _remember_best(state)
        winner = int(state["best_value"].argmax())
        return state["best"][winner], state["best_value"][winner].item()

    # --- the pieces --------------------------------------------------------------------------------------------------

    def _temperature(self, number: int, warmup: WarmUp | None) -> float:
        length = 0 if warmup is None else warmup.total // 2
        if number >= length:
            return 1.0
        return temperature_at(number / length, self.hottest, self.schedule, length)

    def _learn(self, state: State, number: int, total: int) -> None:
        """The shape is learned twice: roughly while it cools, and then at temperature 1."""
        length = total // 2
        if number == length:
            spread.open_window(state)
        if number < length:
            self.moves.learn(state, number, length)
        else:
            self.moves.learn(state, number - length, total - length)

    def _at_best(self, target: Target, state: State) -> State:
        value, gradient = target.value_and_grad(state["best"])
        found = {"position": state["best"], "value": value, "gradient": gradient}
        return {**state, **{name: found[name] for name in self.moves.carried}, "best_value": value}

    def _cooling_moves(self, state: State) -> int:
        """Transitions at one temperature: random walks are slower to follow."""
        return 1 if "gradient" in state else 4


def _change_temperature(state: State, temperature: float) -> None:
    """Set it, and scale the shape with its root, as the spread of a normal does."""
    ratio = temperature / state["temperature"].item()
    if ratio != 1.0:
        state["factor"] = state["factor"] * math.sqrt(ratio)
        state["temperature"] = torch.tensor(temperature, dtype=torch.float64)


def _remember_best(state: State) -> None:
    better = state["value"] > state["best_value"]
    state["best"] = torch.where(better.unsqueeze(1), state["position"], state["best"])
    state["best_value"] = torch.where(better, state["value"], state["best_value"])
