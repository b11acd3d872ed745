"""Random-walk Metropolis (Metropolis et al., 1953; Hastings, 1970), with proposals that learn the posterior's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.tempered_moves import SHAPES, Moves, MoveState, RandomWalk, check_random_walk, is_dense


@dataclass(frozen=True, repr=False, kw_only=True)
class Metropolis(Sampler):
    r"""Chains that take random steps and keep to where the density is: no gradients needed.

    .. math:: \theta' = \theta + s\, L z, \quad z \sim N(0, I), \qquad
        \text{accepted with } \min\!\big(1, p(D, \theta') / p(D, \theta)\big)

    In the warm-up :math:`L L^\top` becomes the covariance of the posterior (Haario, Saksman and Tamminen, 2001), from
    the spread within chains pooled over all of them, and the scale s is tuned to the acceptance that is best for random
    walks (Roberts, Gelman and Gilks, 1997). Both stay as they are from the first draw on. A walk needs some 3 D steps
    to decorrelate, where :class:`HMC` needs a few gradients: this is the sampler for densities whose gradient
    is of no use, and for few dimensions. It is slow to enter necks and to follow sharp bends; R-hat says so.

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
        proposal: Shape of the proposals: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200 dimensions).
        steps: Random-walk steps of one transition; None is one for every two dimensions, from 10 to 200.
        target_acceptance: Acceptance rate of the steps; None is 0.234, and 0.44 in one dimension.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> def log_density(p):
        ...     return -0.5 * (p["x"] ** 2).sum()
        >>> samples = kn.Metropolis(chains=4, draws=200).sample(log_density, {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([4, 200, 2])
    """

    family = "sampling"
    summary = "random-walk chains that need no gradient"
    references = ("metropolis1953",)

    proposal: str = "auto"
    steps: int | None = None
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("proposal", self.proposal, SHAPES)
        check_random_walk(self)

    def kernel(self, dimension: int) -> MetropolisKernel:
        """The transition."""
        dense = is_dense(self.proposal, dimension)
        return MetropolisKernel(RandomWalk(1, dense, self.steps, self.target_acceptance))


@dataclass(frozen=True)
class MetropolisKernel(Kernel):
    """Walks of several steps, all chains in step."""

    moves: Moves

    state_type = MoveState

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> MoveState:
        """Where the chains begin, before any tuning."""
        return self.moves.init(target, position)

    def advance(
        self, target: Target, state: MoveState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[MoveState, Block]:
        """``n`` transitions of every chain."""
        temperature, tuning, found = torch.ones_like(state.value), warmup is not None, []
        for i in target.in_time(n):
            state, info = self.moves.transition(target, state, temperature, generator=generator, tuning=tuning)
            if warmup is not None:
                state = self.moves.learn(state, warmup.first + i, warmup.total)
            found.append((state, info))
        return state, Block.stack(found)

    def tuned(self, state: MoveState) -> dict[str, float]:
        """Step size of the proposals, in standard deviations of the posterior."""
        return {"step_size": state.log_scale.exp().item()}
