"""The No-U-Turn sampler (Hoffman and Gelman, 2014), with multinomial draws along the trajectory (Betancourt, 2017)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Info, Kernel, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling.metric import Metric, MetricState
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.trees import Trees
from knowable.inference.sampling.tuning import (
    DualAveraging,
    begin,
    check_tuning,
    harmonic_mean,
    initial_step_size,
    tunes,
    tunes_at_modes,
)


@dataclass(frozen=True, repr=False, kw_only=True)
class NUTS(Sampler):
    r"""Hamiltonian trajectories that grow until they turn back, each chain at its own pace.

    A trajectory doubles, forwards or backwards at random, until its two ends begin to approach each other:

    .. math:: p_-^\top \Sigma \rho \le 0 \quad\text{or}\quad p_+^\top \Sigma \rho \le 0, \qquad \rho = \sum_i p_i

    or the same holds in a part of it. The next draw is one of its points, with probability proportional to
    :math:`e^{-H}` and a bias towards the later half. Step size and mass are tuned in the warm-up from all chains
    together; then every fifth trajectory has a quarter of the step size, and no more steps than usual, so that no
    chain is stuck for long where the density is narrow. Chains do not wait for each other: one that has finished its
    trajectory begins the next at once, so that every gradient of the batch is used.

    Args:
        chains: Chains that advance together.
        draws: Draws kept of each chain, or None to go on until the chains have mixed.
        max_gradients: Where ``draws`` is None: gradients of each chain, warm-up included, after which the run ends even
            where the chains have not mixed; None is no limit.
        warmup: Transitions before the first draw, in which the sampler tunes itself; None is 300.
        start: Where the chains of a network begin: ``"ensemble"`` (one trained network each), ``"map"`` (one for all),
            ``"prior"`` (draws from it), ``"network"`` (its own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        storage: How draws are kept (:class:`~knowable.ChainStorage`): thinning, number format, memory, a file.
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

    step_size: float | None = None
    mass: str = "auto"
    target_acceptance: float = 0.9
    max_depth: int = 10

    default_warmup: ClassVar[int] = 300  # all chains learn together

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tuning(self)
        check_count("max_depth", self.max_depth, at_most=15)

    def kernel(self, dimension: int) -> NUTSKernel:
        """The transition."""
        return NUTSKernel(self, metrics.kind_for(self.mass, dimension))

    begins_near_modes = tunes_at_modes


_EARLY_DEPTH = 7  # largest depth while chains have not reached the typical set and scales are unknown


@dataclass(frozen=True)
class NUTSState(MetricState):
    """The state of NUTS."""

    step: DualAveraging  # the step size
    depth: int  # doublings of a usual trajectory


@dataclass(frozen=True)
class NUTSKernel(Kernel):
    """Trajectories of every chain's own length; between two blocks all are complete."""

    settings: NUTS
    mass: str

    state_type = NUTSState
    splits = ("position", "value", "gradient")

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> NUTSState:
        """Where the chains begin, before any tuning."""
        common = begin(target, position, self.settings, self.mass, generator=generator)
        step = self.settings.step_size or initial_step_size(
            target, position, Metric(common["inverse_mass"]), generator=generator
        )
        return NUTSState(**common, step=DualAveraging.begin(step), depth=self.settings.max_depth)

    def advance(
        self, target: Target, state: NUTSState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[NUTSState, Block]:
        """``n`` trajectories of every chain."""
        blocks = []
        tunable = self.settings.step_size is None
        small_step_depth = state.depth if warmup is None and tunable else None
        for first, count in _pieces(n, warmup):
            early = warmup is not None and first < metrics.window_opens(warmup.total)
            depth = min(self.settings.max_depth, _EARLY_DEPTH) if early else self.settings.max_depth
            trees = Trees(target, state, count, depth, generator=generator, small_step_depth=small_step_depth)
            step = self._run(trees, state.step, tuning=tunes(warmup) and tunable)
            draw, before = trees.tree, state.inverse_mass
            state = replace(state, position=draw.position, value=draw.value, gradient=draw.gradient, step=step)
            blocks.append(trees.block())
            if warmup is not None:
                state = replace(state, depth=_usual_doublings(blocks[-1].info.steps))
                state = metrics.learn(state, self.mass, blocks[-1].positions, first, warmup.total)
            if state.inverse_mass is not before:
                found = initial_step_size(target, state.position, Metric(state.inverse_mass), generator=generator)
                state = replace(state, step=DualAveraging.begin(found, initial_factor=2.0))
        return state, _joined(blocks)

    def _run(self, trees: Trees, tuned: DualAveraging, *, tuning: bool) -> DualAveraging:
        """All transitions of the trees. One update of the step size for as many trajectories as there are chains.

        Trajectories that diverge end sooner and report first, so that the step size follows the mean of all chains.
        """
        acceptances: list[float] = []
        step = self.settings.step_size or (tuned.current if tuning else tuned.final)
        while not trees.finished:
            acceptances += trees.advance(step)
            while tuning and len(acceptances) >= trees.chains:
                mean = harmonic_mean(torch.tensor(acceptances[: trees.chains]))
                tuned = tuned.update([mean], self.settings.target_acceptance, chains=trees.chains)
                step = tuned.current
                del acceptances[: trees.chains]
        return tuned

    def tuned(self, state: NUTSState) -> dict[str, float]:
        """The step size."""
        return {"step_size": self.settings.step_size or state.step.final}


def _pieces(n: int, warmup: WarmUp | None) -> list[tuple[int, int]]:
    """``n`` transitions cut where windows of the warm-up end: (number of the first, how many)."""
    if warmup is None:
        return [(0, n)]
    first, stop = warmup.first, warmup.first + n
    marks = (*metrics.early_windows(warmup.total), *metrics.windows(warmup.total))
    cuts = [first, *(mark for mark in marks if first < mark < stop), stop]
    return [(begun, end - begun) for begun, end in itertools.pairwise(cuts)]


def _usual_doublings(steps: Tensor | None) -> int:
    """How often a trajectory doubled that has the mean number of steps."""
    assert steps is not None
    return int((steps.double().mean() + 1).log2().round().clamp_min(1))


def _joined(blocks: list[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    infos = [block.info.tensors() for block in blocks]
    info = Info(**{name: torch.cat([each[name] for each in infos]) for name in infos[0]})
    return Block(torch.cat([b.positions for b in blocks]), torch.cat([b.values for b in blocks]), info)
