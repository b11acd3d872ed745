"""Parallel tempering (Swendsen and Wang, 1986; Geyer, 1991): hot copies of a chain carry it from mode to mode."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Info, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.tempered_moves import Moves, MoveState, check_moves, moves_of

_FEWEST, _MOST = 4, 12  # rungs that are chosen without being asked for


@dataclass(frozen=True, repr=False, kw_only=True)
class TemperedChains(Sampler):
    r"""Chains with a ladder of hotter replicas each, neighbours of which now and then change places.

    .. math:: \prod_r p(\theta_r)^{1/T_r}, \quad 1 = T_1 < \dots < T_R, \qquad
        \text{swap } r, s \text{ with } \min\!\big(1, e^{(1/T_r - 1/T_s)(\log p(\theta_s) - \log p(\theta_r))}\big)

    Replicas at high temperature cross between modes, and what they find comes down the ladder: chains at temperature 1
    visit all modes in the right proportion. Pairs with an even and an odd lower rung swap in turn. Only the chains at
    temperature 1 are draws, but every one of them costs as many gradients as there are rungs. In the warm-up each rung
    learns its own step size and covariance, and the temperatures between the first and the last move until all
    neighbours swap equally often (Kofke, 2002; Vousden, Farr and Mandel, 2016).

    Args:
        chains: Chains at temperature 1.
        draws: Draws kept of each chain, or None to go on until the chains have mixed.
        max_gradients: Where ``draws`` is None: gradients of each chain, warm-up included, after which the run ends even
            where the chains have not mixed; None is no limit.
        warmup: Transitions before the first draw, in which the sampler tunes itself; None is 500.
        start: Where the chains of a network begin: ``"ensemble"`` (one trained network each), ``"map"`` (one for all),
            ``"prior"`` (draws from it), ``"network"`` (its own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        storage: How draws are kept (:class:`~knowable.ChainStorage`): thinning, number format, memory, a file.
        temperatures: The ladder, beginning with 1 and rising, which then stays as it is; None makes one.
        hottest: Highest temperature of a ladder that is made. Barriers between modes become so many times lower.
        rungs: Temperatures of a ladder that is made; None is as many as let neighbours swap two times in five on a
            normal of that dimension, from 4 to 12.
        moves: ``"hmc"`` or ``"metropolis"``, which needs no gradients.
        mass: Covariance that moves learn for each rung: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200
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
    moves: str = "hmc"
    mass: str = "auto"
    steps: int | None = None
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_moves(self)
        if self.temperatures is not None:
            _check_ladder(self.temperatures)
        check_number("hottest", self.hottest, above=1)
        if self.rungs is not None:
            check_count("rungs", self.rungs, at_least=2)

    def kernel(self, dimension: int) -> TemperedKernel:
        """The transition."""
        ladder = self.ladder(dimension)
        moves = moves_of(self, dimension, len(ladder))
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
class TemperedState(State):
    """The state of tempered chains."""

    replicas: MoveState  # of all rungs, one rung after the other; the first are the chains
    ladder: Tensor  # temperatures, (R,)
    swaps: Tensor  # sum of the acceptance of swaps between neighbours, (R - 1,)
    tries: Tensor  # how many there were
    transitions: int = 0  # made so far, warm-up included


@dataclass(frozen=True)
class TemperedKernel(Kernel):
    """Moves of all replicas, rung by rung in one batch, then swaps of neighbours."""

    moves: Moves
    ladder: tuple[float, ...]
    adapts: bool = True

    state_type = TemperedState

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> TemperedState:
        """Where the chains begin: all replicas of a chain at the same place."""
        replicas = self.moves.init(target, position.repeat(len(self.ladder), 1))
        heat = torch.tensor(self.ladder, dtype=torch.float64)
        root = heat.sqrt().to(replicas.factor).reshape(-1, *[1] * (replicas.factor.dim() - 1))
        none = torch.zeros(len(heat) - 1, dtype=torch.float64)
        value = replicas.value[: len(position)]
        return TemperedState(position, value, replace(replicas, factor=replicas.factor * root), heat, none, none)

    def advance(
        self, target: Target, state: TemperedState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[TemperedState, Block]:
        """``n`` transitions of every chain: a move of every replica and a round of swaps."""
        chains, found = len(state.position), []
        for i in target.in_time(n):
            heat = state.ladder.to(state.value).repeat_interleave(chains)
            replicas, info = self.moves.transition(
                target, state.replicas, heat, generator=generator, tuning=warmup is not None
            )
            state, swap = self._swap(replace(state, replicas=replicas), generator)
            if warmup is not None:
                number = warmup.first + i
                state = self._adapted(state, number, warmup.total) if self.adapts else state
                state = replace(state, replicas=self.moves.learn(state.replicas, number, warmup.total))
            position, value = state.replicas.position[:chains], state.replicas.value[:chains]
            state = replace(state, position=position, value=value, transitions=state.transitions + 1)
            own = {name: each[:chains] for name, each in info.tensors().items()}
            found.append((state, Info(**own, swap=swap)))
        return state, Block.stack(found)

    def tuned(self, state: TemperedState) -> dict[str, float]:
        """The step size at temperature 1, the rungs, and the smallest swap rate of two neighbours."""
        rates = state.swaps / state.tries.clamp_min(1.0)
        return {
            "step_size": state.replicas.log_scale[0].exp().item(), "rungs": float(len(state.ladder)),
            "swap_acceptance": rates.min().item(),
        }  # fmt: skip

    def _swap(self, state: TemperedState, generator: torch.Generator) -> tuple[TemperedState, Tensor]:
        """One round of swaps, and the mean acceptance of every chain ``(C,)``."""
        replicas, rungs, chains = state.replicas, len(state.ladder), len(state.position)
        ladder = state.ladder.to(replicas.value)
        lower = torch.arange(state.transitions % 2 if rungs > 2 else 0, rungs - 1, 2)
        uniform = torch.rand((len(lower), chains), generator=generator, dtype=ladder.dtype, device=ladder.device)
        order, acceptance = swaps(replicas.value.reshape(rungs, chains), ladder, lower.to(ladder.device), uniform)
        to, gradient = order.flatten(), replicas.gradient
        replicas = replace(
            replicas, position=replicas.position[to], value=replicas.value[to],
            gradient=None if gradient is None else gradient[to],
        )  # fmt: skip
        rates = acceptance.double().mean(1).cpu()
        counts = state.swaps.index_add(0, lower, rates), state.tries.index_add(0, lower, torch.ones_like(rates))
        return replace(state, replicas=replicas, swaps=counts[0], tries=counts[1]), acceptance.mean(0)

    def _adapted(self, state: TemperedState, number: int, total: int) -> TemperedState:
        """Every tenth transition of the warm-up the ladder follows the swap rates; the last tenth leaves it alone."""
        if number % 10 != 9 and number + 1 != total:
            return state
        ladder, none = state.ladder, torch.zeros_like(state.swaps)
        if number < 0.9 * total and number % 10 == 9:
            ladder = equalised(ladder, state.swaps / state.tries.clamp_min(1.0), number)
        return replace(state, ladder=ladder, swaps=none, tries=none)


def swaps(values: Tensor, ladder: Tensor, lower: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    r"""Swap neighbours on the ladder, independently for every chain.

    .. math:: \alpha_{r,r+1} = \min\!\big(1, e^{(1/T_r - 1/T_{r+1})(\log p(\theta_{r+1}) - \log p(\theta_r))}\big)

    ``lower`` ``(P,)`` has the lower rungs r of the pairs that may swap, no two of which are neighbours; ``values`` are
    log densities at temperature 1, ``(R, C)``. Returns where each place takes its replica from, as indices into
    ``R * C`` flattened places, ``(R, C)``; and the probabilities of acceptance, ``(P, C)``.
    """
    rungs, chains = values.shape
    colder = 1 / ladder[lower] - 1 / ladder[lower + 1]
    gain = values[lower + 1] - values[lower]
    acceptance = (colder.unsqueeze(1) * gain).clamp_max(0.0).exp().nan_to_num(0.0)
    accepted = uniform < acceptance
    order = torch.arange(rungs * chains, device=values.device).reshape(rungs, chains)
    below, above = order[lower], order[lower + 1]
    order[lower], order[lower + 1] = torch.where(accepted, above, below), torch.where(accepted, below, above)
    return order, acceptance


def equalised(ladder: Tensor, rates: Tensor, number: int) -> Tensor:
    """A ladder on which neighbours that swap at lower ``rates`` are nearer; changes shrink with ``number``."""
    logs = ladder.log()
    gaps = logs.diff() * ((rates - rates.mean()) * 3 / math.sqrt(1 + number / 10)).exp()
    places = torch.cat([logs[:1], gaps.cumsum(0) * (logs[-1] - logs[0]) / gaps.sum()])
    places[-1] = logs[-1]
    return places.exp()


def _check_ladder(temperatures: tuple[float, ...]) -> None:
    if not isinstance(temperatures, tuple | list):
        raise InvalidType(f"temperatures must be a tuple of numbers, got {type(temperatures).__name__}.")
    each = [check_number("temperatures", one, above=0) for one in temperatures]
    if len(each) < 2 or each[0] != 1.0 or any(a >= b for a, b in pairwise(each)):
        raise InvalidArgument(f"temperatures must be at least two numbers that begin with 1 and rise, got {each}.")
