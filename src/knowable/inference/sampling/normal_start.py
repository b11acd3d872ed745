r"""Where chains begin, and with which metric, on densities that are about normal around their modes.

Scales that differ by orders of magnitude, as coefficients of raw predictors do, leave chains no step that suits all of
them: they creep towards the mass, and what they learn of its spread on the way is wrong. The mode and the inverse
Hessian there say it all at once. But a mode need not be where the mass is (a funnel's is deep in its neck), so
importance weights of draws from a Student t with that centre and curvature are asked first. Where they are worthless,
chains begin where they are, with a metric of 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.target import Target
from knowable.core.support.randomness import generator_for
from knowable.core.support.time_limit import time_left
from knowable.inference.sampling.mode import StudentTProposal, climb, effective_size, laplace_proposal
from knowable.inference.sampling.pareto import smooth_weights
from knowable.inference.sampling.sampler import Sampler

_DRAWS = 400  # that are weighed
_DF = 5.0  # of the Student t: tails heavy enough to see what the curvature misses
_WORTH = 0.05  # least share of the draws that the weights are worth
_SEARCH = 200  # steps up to the mode
_MOST_DIMENSIONS = 100  # for which the Hessian is worth its time


@dataclass(frozen=True, repr=False)
class BeginsNearModes(Sampler):
    """A sampler whose chains on a bare density begin near the modes, where the density is about normal around them."""

    def scattered(self, target: Target, first: Tensor, seed: int) -> Tensor:
        """Where the chains begin, ``(chains, D)``, from the one position given, ``(1, D)``."""
        found = super().scattered(target, first, seed)
        if not self.looks_for_modes(found.shape[1]):
            return found
        return near_modes(target, found, generator=generator_for(seed, "modes", device=found.device))

    def looks_for_modes(self, dimension: int) -> bool:
        """Whether modes are looked for, in so many dimensions; where time is limited, none of it is spent on them."""
        return dimension <= _MOST_DIMENSIONS and time_left() is None


def normal_around_mode(target: Target, position: Tensor, *, generator: torch.Generator) -> StudentTProposal | None:
    """The Student t at the mode found from the best of ``position`` ``(C, D)``; None if the density is not like it."""
    best = position[_finite(target.value(position)).argmax()]
    proposal = laplace_proposal(target, best.unsqueeze(0), df=_DF, search=_SEARCH)
    if not torch.isfinite(proposal.factor).all():
        return None
    drawn, log_q = proposal.draw(_DRAWS, generator)
    log_weights = _finite(target.value(drawn.to(position)).double() - log_q)
    if log_weights.max() == -math.inf:
        return None
    smoothed, k = smooth_weights(log_weights)
    good = k <= 0.7 and effective_size(smoothed) >= _WORTH * _DRAWS
    return proposal if good else None


def near_modes(target: Target, position: Tensor, *, generator: torch.Generator) -> Tensor:
    """Positions ``(C, D)`` that are spread around the mode to which each chain climbs from its own.

    All stay where they are if the density is not like a normal around the best mode. Modes that chains do not reach
    from where they are given are missed as before.
    """
    normal = normal_around_mode(target, position, generator=generator)
    if normal is None:
        return position
    modes = torch.stack([climb(target, each, _SEARCH) for each in position]).to(position)
    noise = normal.draw(len(position), generator)[0] - normal.loc
    found = modes + noise.to(position)
    value, gradient = target.value_and_grad(found)
    good = torch.isfinite(value) & torch.isfinite(gradient).all(-1)
    return torch.where(good.unsqueeze(-1), found, modes)


def _finite(values: Tensor) -> Tensor:
    return values.nan_to_num(-math.inf, -math.inf, -math.inf)
