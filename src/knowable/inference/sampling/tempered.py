"""Parallel tempering (Swendsen and Wang, 1986; Geyer, 1991): hot copies of a chain carry it from mode to mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.sampling.moves import MovedSampler, Moves

_REPLICA = "replica."  # prefix of what the moves keep of all replicas
_FEWEST, _MOST = 4, 12  # rungs that are chosen without being asked for


@dataclass(frozen=True, repr=False)
class TemperedChains(MovedSampler):
    r"""Chains with a ladder of hotter replicas each, neighbours of which now and then change places.

    .. math:: \prod_r p(\theta_r)^{1/T_r}, \quad 1 = T_1 < \dots < T_R, \qquad
        \text{swap } r, s \text{ with } \min\!\big(1, e^{(1/T_r - 1/T_s)(\log p(\theta_s) - \log p(\theta_r))}\big)

    Replicas at high temperature cross between modes, and what they find comes down the ladder: chains at temperature 1
    visit all modes in the right proportion. Pairs with an even and an odd lower rung swap in turn. Only the chains at
    temperature 1 are draws, but every one of them costs as many gradients as there are rungs. In the warm-up each rung
    learns its own steps and shape, and the temperatures between the first and the last move until all neighbours swap
    equally often (Kofke, 2002; Vousden, Farr and Mandel, 2016).

    Args:
        chains: Chains at temperature 1. This and the other fields of
            :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        temperatures: The ladder, beginning with 1 and rising, which then stays as it is; None makes one.
        hottest: Highest temperature of a ladder that is made. Barriers between modes become so many times lower.
        rungs: Temperatures of a ladder that is made; None is as many as let neighbours swap two times in five on a
            normal of that dimension, from 4 to 12.
        moves: ``"hmc"`` or ``"metropolis"``, which needs no gradients.
        mass: What moves learn of each rung's shape: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200
            dimensions).
        steps: Mean number of leapfrog steps, or number of random-walk steps, of a transition; None chooses.
        target_acceptance: Acceptance that steps are tuned to; None is 0.95, or 0.234 for random walks.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> def log_density(p):  # modes at -4 and 4
        ...     return torch.logaddexp(-0.5 * (p["x"] - 4) ** 2, -0.5 * (p["x"] + 4) ** 2).sum()
        >>> samples = kn.TemperedChains(chains=4).sample(log_density, {"x": torch.tensor([4.0])})
        >>> bool((samples.draws["x"] < 0).any(1).all())  # every chain has been to the other mode
        True
    """

    family = "sampling"
    summary = "chains at several temperatures that swap places: for posteriors with separate modes"
    aliases = ("parallel_tempering",)
    references = ("geyer1991",)

    chains: int = 8
    temperatures: tuple[float, ...] | None = None
    hottest: float = 10.0
    rungs: int | None = None

    default_warmup: ClassVar[int] = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperatures is not None:
            _check_ladder(self.temperatures)
        check_number("hottest", self.hottest, above=1)
        if self.rungs is not None:
            check_count("rungs", self.rungs, at_least=2)

    def kernel(self, dimension: int) -> TemperedKernel:
        """The transition."""
        ladder = self.ladder(dimension)
        moves = self.moves_for(dimension, len(ladder))
        return TemperedKernel(moves, tuple(ladder), adapts=self.temperatures is None)

    def ladder(self, dimension: int) -> list[float]:
        """The first temperatures of the warm-up: those given, or equal ratios up to the hottest."""
        if self.temperatures is not None:
            return [float(each) for each in self.temperatures]
        highest = math.log(self.hottest)
        wanted = 1 + math.ceil(highest * math.sqrt(dimension) / 1.68)  # log ratio at which 2 in 5 swaps are made
        rungs = self.rungs or min(max(wanted, _FEWEST), _MOST)
        return [math.exp(highest * r / (rungs - 1)) for r in range(rungs)]


@dataclass(frozen=True)
class TemperedKernel(Kernel):
    """Moves of all replicas, rung by rung in one batch, then swaps of neighbours."""

    moves: Moves
    ladder: tuple[float, ...]
    adapts: bool = True

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin: all replicas of a chain at the same place."""
        replicas = self.moves.init(target, position.repeat(len(self.ladder), 1))
        heat = torch.tensor(self.ladder, dtype=torch.float64)
        root = heat.sqrt().to(replicas["factor"])
        replicas["factor"] = replicas["factor"] * root.reshape(-1, *[1] * (replicas["factor"].dim() - 1))
        return {
            "position": position, "transitions": torch.zeros((), dtype=torch.int64), "ladder": heat,
            "swaps": torch.zeros(len(heat) - 1, dtype=torch.float64), "tries": torch.zeros(len(heat) - 1).double(),
            **_named(replicas),
        }  # fmt: skip

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` transitions of every chain: a move of every replica and a round of swaps."""
        state, chains = dict(state), len(state["position"])
        replicas = {name.removeprefix(_REPLICA): v for name, v in state.items() if name.startswith(_REPLICA)}
        found = []
        for i in target.in_time(n):
            ladder = state["ladder"].to(replicas["value"])
            heat = ladder.repeat_interleave(chains)
            info = self.moves.transition(target, replicas, heat, generator=generator, tuning=warmup is not None)
            info = {name: value[:chains] for name, value in info.items()}
            info["swap"] = self._swap(state, replicas, ladder, generator, warmup, i)
            if warmup is not None:
                self.moves.learn(replicas, warmup.first + i, warmup.total)
            state["transitions"] = state["transitions"] + 1
            found.append((replicas["position"][:chains], replicas["value"][:chains], info))
        state |= _named(replicas)
        state["position"] = replicas["position"][:chains]
        return state, Block.stack(found)

    def tuned(self, state: State) -> dict[str, float]:
        """The step size at temperature 1, the rungs, and how often the most reluctant neighbours swap."""
        rates = state["swaps"] / state["tries"].clamp_min(1.0)
        return {
            "step_size": state[_REPLICA + "log_scale"][0].exp().item(), "rungs": float(len(state["ladder"])),
            "swap_acceptance": rates.min().item(),
        }  # fmt: skip

    def _swap(
        self, state: State, replicas: State, ladder: Tensor, generator: torch.Generator, warmup: WarmUp | None, i: int
    ) -> Tensor:
        """One round of swaps, counted and in the warm-up learned from; the mean acceptance of every chain ``(C,)``."""
        rungs = len(ladder)
        lower = torch.arange(int(state["transitions"]) % 2 if rungs > 2 else 0, rungs - 1, 2)
        chains = len(state["position"])
        luck = torch.rand((len(lower), chains), generator=generator, dtype=ladder.dtype, device=ladder.device)
        order, acceptance = swaps(replicas["value"].reshape(rungs, chains), ladder, lower.to(ladder.device), luck)
        for name in self.moves.carried:
            replicas[name] = replicas[name][order.flatten()]
        rates = acceptance.double().mean(1).cpu()
        state["swaps"] = state["swaps"].index_add(0, lower, rates)
        state["tries"] = state["tries"].index_add(0, lower, torch.ones_like(rates))
        if warmup is not None and self.adapts:
            number = warmup.first + i
            if number < 0.9 * warmup.total and number % 10 == 9:
                state["ladder"] = equalised(state["ladder"], state["swaps"] / state["tries"].clamp_min(1.0), number)
            if number % 10 == 9 or number + 1 == warmup.total:
                state["swaps"], state["tries"] = torch.zeros_like(state["swaps"]), torch.zeros_like(state["tries"])
        return acceptance.mean(0)


def swaps(values: Tensor, ladder: Tensor, lower: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
    r"""Swap neighbours on the ladder, independently for every chain.

    .. math:: \alpha_{r,r+1} = \min\!\big(1, e^{(1/T_r - 1/T_{r+1})(\log p(\theta_{r+1}) - \log p(\theta_r))}\big)

    Args:
        values: Log densities of the replicas at temperature 1, ``(R, C)``.
        ladder: Temperatures, ``(R,)``.
        lower: The lower rungs r of the pairs that may swap, no two of which are neighbours, ``(P,)``.
        luck: Uniform numbers, ``(P, C)``.

    Returns:
        Where each place takes its replica from, as indices into ``R * C`` flattened places, ``(R, C)``; and the
        probabilities of acceptance, ``(P, C)``.
    """
    rungs, chains = values.shape
    colder = 1 / ladder[lower] - 1 / ladder[lower + 1]
    gain = values[lower + 1] - values[lower]
    acceptance = (colder.unsqueeze(1) * gain).clamp_max(0.0).exp().nan_to_num(0.0)
    accepted = luck < acceptance
    order = torch.arange(rungs * chains, device=values.device).reshape(rungs, chains)
    below, above = order[lower], order[lower + 1]
    order[lower], order[lower + 1] = torch.where(accepted, above, below), torch.where(accepted, below, above)
    return order, acceptance


def equalised(ladder: Tensor, rates: Tensor, number: int) -> Tensor:
    """A ladder on which neighbours that swap less often than the others are nearer, with the same two ends.

    Args:
        ladder: Temperatures, ``(R,)``.
        rates: How often neighbours swap, ``(R - 1,)``.
        number: Of the transition: later changes are smaller.
    """
    logs = ladder.log()
    gaps = logs.diff() * ((rates - rates.mean()) * 3 / math.sqrt(1 + number / 10)).exp()
    places = torch.cat([logs[:1], gaps.cumsum(0) * (logs[-1] - logs[0]) / gaps.sum()])
    places[-1] = logs[-1]
    return places.exp()


def _named(replicas: State) -> State:
    return {_REPLICA + name: value for name, value in replicas.items()}


def _check_ladder(temperatures: tuple[float, ...]) -> None:
    if not isinstance(temperatures, tuple | list):
        raise InvalidType(f"temperatures must be a tuple of numbers, got {type(temperatures).__name__}.")
    each = [check_number("temperatures", one, above=0) for one in temperatures]
    if len(each) < 2 or each[0] != 1.0 or any(a >= b for a, b in pairwise(each)):
        raise InvalidArgument(f"temperatures must be at least two numbers that begin with 1 and rise, got {each}.")
