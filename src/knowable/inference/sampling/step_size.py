r"""Dual averaging: a step size at which proposals are accepted as often as wanted (Hoffman and Gelman, 2014).

The state is one small tensor ``[log step, log averaged step, mean error, updates, anchor]`` in double precision, shared
by all chains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.target import Target
from knowable.inference.sampling.metric import Metric

_GAMMA, _SLOWEST, _DELAY, _DECAY = 0.05, 0.2, 10.0, 0.75
_STUCK = 0.01  # a smaller acceptance counts as this one
SHORTEST = 20  # transitions of a warm-up


def begin(step: float, *, boldness: float = 10.0) -> Tensor:
    """The state that starts from ``step`` and is drawn towards ``boldness`` times it: larger steps are tried first."""
    return torch.tensor([math.log(step), math.log(step), 0.0, 0.0, math.log(boldness * step)], dtype=torch.float64)


def update(state: Tensor, acceptances: Iterable[float], target: float, *, chains: int = 1) -> Tensor:
    r"""One update for each acceptance probability, the mean over so many ``chains``.

    .. math:: \bar H_t = \Big(1 - \frac{1}{t + t_0}\Big) \bar H_{t-1} + \frac{\delta - \alpha_t}{t + t_0}, \qquad
        \log\epsilon_t = \mu - \frac{\sqrt t}{\gamma} \bar H_t

    The paper's :math:`\gamma = 0.05` is for the acceptances of one chain, which say little each. The mean over many
    says much, and the same answer to it throws the step up and down by factors of ten: too long and too short ones,
    which waste gradients, for as long as the warm-up lasts. So :math:`\gamma` grows as the root of their number, up to
    0.2.
    """
    gamma = min(_SLOWEST, _GAMMA * math.sqrt(chains))
    log_step, averaged, error, count, anchor = state.tolist()
    for acceptance in acceptances:
        count += 1
        share = 1 / (count + _DELAY)
        error = (1 - share) * error + share * (target - acceptance)
        log_step = anchor - math.sqrt(count) / gamma * error
        weight = count**-_DECAY
        averaged = weight * log_step + (1 - weight) * averaged
    return torch.tensor([log_step, averaged, error, count, anchor], dtype=torch.float64)


def harmonic_mean(acceptance: Tensor) -> float:
    """The mean over chains that a few stuck ones pull down (Hoffman, Radul and Sountsov, 2021).

    At a target of 0.8 some two in a thousand may be stuck.
    """
    return len(acceptance) / (1 / acceptance.double().clamp_min(_STUCK)).sum().item()


def tunes(warmup: WarmUp | None) -> bool:
    """Whether a warm-up is long enough to tune the step; else the first sensible one stays."""
    return warmup is not None and warmup.total >= SHORTEST


def current(state: Tensor) -> float:
    """The step to use while tuning."""
    return math.exp(state[0].item())


def final(state: Tensor) -> float:
    """The step to use once tuning has ended."""
    return math.exp(state[1].item() if state[3] > 0 else state[0].item())


def sensible(target: Target, position: Tensor, metric: Metric, *, generator: torch.Generator) -> float:
    """A first step: doubled or halved until one leapfrog step is accepted about half of the time.

    Args:
        target: The log density.
        position: Where the chains are, ``(C, D)``.
        metric: What momenta are drawn with.
        generator: For the momenta.
    """
    value, gradient = target.value_and_grad(position)
    noise = torch.randn(position.shape, generator=generator, dtype=position.dtype, device=position.device)
    momentum = metric.momentum(noise)
    kinetic = metric.kinetic(momentum)

    def accepted(step: float) -> bool:
        half = momentum.add(gradient, alpha=0.5 * step)
        proposed, slope = target.value_and_grad(position.add(metric.velocity(half), alpha=step))
        change = proposed - value - metric.kinetic(half.add(slope, alpha=0.5 * step)) + kinetic
        return bool(change.nan_to_num(-math.inf, -math.inf, -math.inf).clamp_max(0.0).exp().mean() > 0.5)

    step = 1.0
    direction = 1 if accepted(step) else -1
    for _ in range(60):
        step *= 2.0**direction
        if accepted(step) != (direction == 1):
            break
    return step if direction == -1 else step / 2
