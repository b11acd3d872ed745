"""Random-walk Metropolis (Metropolis et al., 1953; Hastings, 1970), with proposals that learn the posterior's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.inference.sampling import warmup_covariance as spread
from knowable.inference.sampling.moves import Moves, RandomWalk
from knowable.inference.sampling.sampler import Sampler


@dataclass(frozen=True, repr=False)
class Metropolis(Sampler):
    r"""Chains that take random steps and keep to where the density is: no gradients needed.

    .. math:: \theta' = \theta + s\, L z, \quad z \sim N(0, I), \qquad
        \text{accepted with } \min\!\big(1, p(D, \theta') / p(D, \theta)\big)

    In the warm-up :math:`L L^\top` becomes the covariance of the posterior (Haario, Saksman and Tamminen, 2001), from
    the spread within chains pooled over all of them, and the scale s is tuned to the acceptance that is best for random
    walks (Roberts, Gelman and Gilks, 1997). Both stay as they are from the first draw on. A walk needs some 3 D steps
    to forget where it was, where :class:`HMC` needs a few gradients: this is the sampler for densities whose gradient
    is of no use, and for few dimensions. It is slow to enter necks and to follow sharp bends; R-hat says so.

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        proposal: Shape of the proposals: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200 dimensions).
        steps: Random-walk steps of one transition; None is one for every two dimensions, from 10 to 200.
        target_acceptance: Share of steps to accept; None is 0.234, and 0.44 in one dimension.

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
        check_choice("proposal", self.proposal, spread.KINDS)
        if self.steps is not None:
            check_count("steps", self.steps)
        if self.target_acceptance is not None:
            check_number("target_acceptance", self.target_acceptance, above=0, below=1)

    def kernel(self, dimension: int) -> MetropolisKernel:
        """The transition."""
        dense = spread.is_dense(self.proposal, dimension)
        return MetropolisKernel(RandomWalk(1, dense, self.steps, self.target_acceptance))


@dataclass(frozen=True)
class MetropolisKernel(Kernel):
    """Walks of several steps, all chains in step."""

    moves: Moves

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin, before any tuning."""
        return self.moves.init(target, position)

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` transitions of every chain."""
        state, found = dict(state), []
        temperature = torch.ones_like(state["value"])
        for i in target.in_time(n):
            info = self.moves.transition(target, state, temperature, generator=generator, tuning=warmup is not None)
            if warmup is not None:
                self.moves.learn(state, warmup.first + i, warmup.total)
            found.append((state["position"], state["value"], info))
        return state, Block.stack(found)

    def tuned(self, state: State) -> dict[str, float]:
        """Scale of the proposals, in units of the posterior's spread."""
        return {"step_size": state["log_scale"].exp().item()}
