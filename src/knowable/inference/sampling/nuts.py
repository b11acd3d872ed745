"""The No-U-Turn sampler (Hoffman and Gelman, 2014), with multinomial draws along the trajectory (Betancourt, 2017)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling import step_size as steps
from knowable.inference.sampling.trees import Trees
from knowable.inference.sampling.tuning import TunedSampler, begin, sensible_step


@dataclass(frozen=True, repr=False)
class NUTS(TunedSampler):
    r"""Hamiltonian trajectories that grow until they turn back, each chain at its own pace.

    A trajectory doubles, forwards or backwards at random, until its two ends begin to approach each other:

    .. math:: p_-^\top \Sigma \rho \le 0 \quad\text{or}\quad p_+^\top \Sigma \rho \le 0, \qquad \rho = \sum_i p_i

    or the same holds in a part of it. The next draw is one of its points, with probability proportional to
    :math:`e^{-H}` and a bias towards the later half. Step size and mass are tuned in the warm-up from all chains
    together; then every fifth trajectory has steps of a quarter of the size, and no more of them than usual, so that no
    chain is stuck for long where the density is narrow. Chains do not wait for each other: one that has finished its
    trajectory begins the next at once, so that every gradient of the batch is used.

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        step_size: Leapfrog step, or None to tune it.
        mass: ``"diagonal"``, ``"dense"``, ``"identity"``, or ``"auto"``: dense up to 100 dimensions, diagonal beyond.
        target_acceptance: Mean acceptance along a trajectory that the step size is tuned to, as a harmonic mean over
            chains: a few that are stuck count for much. At 0.8 steps are a quarter longer, and now and then too long
            for the tails of a bent density.
        max_depth: Longest trajectory: 2 to this power leapfrog steps.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.NUTS(chains=4, draws=100).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([4, 100, 2])
    """

    family = "sampling"
    summary = "Hamiltonian trajectories that stop where they turn back: the reference for small networks"
    references = ("hoffman2014", "betancourt2017")

    target_acceptance: float = 0.9
    max_depth: int = 10

    default_warmup: ClassVar[int] = 300  # all chains learn together

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_depth", self.max_depth, at_most=15)

    def kernel(self, dimension: int) -> NUTSKernel:
        """The transition."""
        return NUTSKernel(self, self.mass_for(dimension))


_EARLY_DEPTH = 7  # at most, while chains still look for the typical set and nothing is known of scales


@dataclass(frozen=True)
class NUTSKernel(Kernel):
    """Trajectories of every chain's own length; between two blocks all are complete."""

    settings: NUTS
    mass: str

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin, before any tuning."""
        state = begin(target, position, self.settings, generator=generator)
        first = self.settings.step_size or sensible_step(target, state, generator)
        depth = torch.tensor(self.settings.max_depth)  # doublings of a usual trajectory
        return {**state, "step": steps.begin(first), "depth": depth}

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` trajectories of every chain."""
        state = dict(state)
        blocks = []
        tunable = self.settings.step_size is None
        careful = int(state["depth"]) if warmup is None and tunable else None
        for first, count in _pieces(n, warmup):
            depth = self._most_doublings(first, warmup)
            trees = Trees(target, state, count, depth, generator=generator, careful_depth=careful)
            self._run(trees, state, tuning=steps.tunes(warmup) and tunable)
            state |= trees.ends()
            blocks.append(trees.block())
            if warmup is not None:
                state["depth"] = _usual_doublings(blocks[-1].info["steps"])
                if metrics.learn(state, self.mass, blocks[-1].positions, first, warmup.total):
                    state["step"] = steps.begin(sensible_step(target, state, generator), boldness=2.0)
        return state, _joined(blocks)

    def _most_doublings(self, first: int, warmup: WarmUp | None) -> int:
        early = warmup is not None and first < metrics.window_opens(warmup.total)
        return min(self.settings.max_depth, _EARLY_DEPTH) if early else self.settings.max_depth

    def _run(self, trees: Trees, state: State, *, tuning: bool) -> None:
        """All transitions of the trees. One update of the step for as many trajectories as there are chains.

        Trajectories that fail end sooner and report first, so that the mean of all chains is what the step follows.
        """
        heard: list[float] = []
        step = self.settings.step_size or (steps.current if tuning else steps.final)(state["step"])
        while not trees.finished:
            heard += trees.tick(step)
            while tuning and len(heard) >= trees.chains:
                mean = steps.harmonic_mean(torch.tensor(heard[: trees.chains]))
                state["step"] = steps.update(
                    state["step"], [mean], self.settings.target_acceptance, chains=trees.chains
                )
                step = steps.current(state["step"])
                del heard[: trees.chains]

    def tuned(self, state: State) -> dict[str, float]:
        """The step size."""
        return {"step_size": self.settings.step_size or steps.final(state["step"])}


def _pieces(n: int, warmup: WarmUp | None) -> list[tuple[int, int]]:
    """``n`` transitions cut where windows of the warm-up end: (number of the first, how many)."""
    if warmup is None:
        return [(0, n)]
    first, stop = warmup.first, warmup.first + n
    marks = (*metrics.early_windows(warmup.total), *metrics.windows(warmup.total))
    cuts = [first, *(mark for mark in marks if first < mark < stop), stop]
    return [(begun, end - begun) for begun, end in itertools.pairwise(cuts)]


def _usual_doublings(taken: Tensor) -> Tensor:
    """How often a trajectory doubled whose steps are the mean of those ``taken``."""
    return (taken.double().mean() + 1).log2().round().clamp_min(1).long().cpu()


def _joined(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    info = {name: torch.cat([block.info[name] for block in blocks]) for name in blocks[0].info}
    positions, values = [torch.cat(each) for each in zip(*((b.positions, b.values) for b in blocks), strict=True)]
    return Block(positions, values, info)
