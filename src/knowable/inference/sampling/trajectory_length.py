r"""How long a trajectory should be: the length at which it achieves most for its cost.

What it achieves is ChEES, the change in the estimator of the expected square (Hoffman, Radul and Sountsov, 2021)

.. math:: C = \tfrac14 E\big[(\|\theta' - \bar\theta\|^2 - \|\theta - \bar\theta\|^2)^2\big]

and its cost is its length T: C / T is increased by gradient steps on log T, the same for all chains (without the
division lengths that wander beyond the best one never come back, for C is flat there). Distances are in units of the
posterior and from each chain's own running mean, so that chains in different modes do not mislead it. Lengths are
jittered between 0 and twice the mean. The state is one small tensor ``[log length, averaged, slope of C, C, updates]``
in double precision, where slope and C are fading means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_RATE = 0.03  # of the steps on log T
_MEMORY = 0.9  # of the fading means
_MOST_STEPS = 500.0


def begin(length: float) -> Tensor:
    """The state that starts from ``length``."""
    return torch.tensor([math.log(length), math.log(length), 0.0, 0.0, 0.0], dtype=torch.float64)


def length(state: Tensor, *, tuning: bool) -> float:
    """The mean length to use while tuning, or once tuning has ended."""
    return math.exp(state[0 if tuning else 1].item())


def update(
    state: Tensor, before: Tensor, after: Tensor, velocity: Tensor, acceptance: Tensor, *, share: float, step: float
) -> Tensor:  # fmt: skip
    """One step up the gradient of log(C / T).

    Args:
        state: As above.
        before: Distance from the mean at the beginning of a trajectory, ``(C, D)``, in units of the posterior.
        after: The same at its end.
        velocity: At its end.
        acceptance: Probability that its end is accepted, ``(C,)``.
        share: Half of the factor between this trajectory's length and the mean length.
        step: The step size: lengths stay between one and a few hundred steps.
    """
    log_length, averaged, slope, change, count = state.tolist()
    before, after, velocity, weight = (each.double() for each in (before, after, velocity, acceptance))
    gain = after.square().sum(-1) - before.square().sum(-1)
    time = 2 * share * math.exp(log_length)
    new_slope = (weight * gain * (after * velocity).sum(-1)).mean().item() * time  # dC / d log T
    new_change = 0.25 * (weight * gain.square()).mean().item()
    if not (math.isfinite(new_slope) and math.isfinite(new_change)):
        return state
    count += 1
    slope, change = _MEMORY * slope + (1 - _MEMORY) * new_slope, _MEMORY * change + (1 - _MEMORY) * new_change
    rise = slope / change - 1.0 if change > 0 else 0.0  # d log(C / T) / d log T
    log_length += _RATE * min(max(rise, -2.0), 2.0)
    log_length = min(max(log_length, math.log(step)), math.log(_MOST_STEPS * step))
    fresh = max(0.02, 1 / count)
    averaged = (1 - fresh) * averaged + fresh * log_length
    return torch.tensor([log_length, averaged, slope, change, count], dtype=torch.float64)


def running_mean(mean: Tensor, position: Tensor, number: int) -> Tensor:
    """Each chain's mean so far, over about its last hundred positions."""
    return mean + (position - mean) / min(number + 2, 100)


def halton(number: int) -> float:
    """The ``number``-th element of the van der Corput sequence in base 2, in (0, 1)."""
    value, share = 0.0, 0.5
    while number:
        value += share * (number & 1)
        number >>= 1
        share /= 2
    return value
