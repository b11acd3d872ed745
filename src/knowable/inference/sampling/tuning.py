"""What samplers that follow the gradient tune in the warm-up: the step size, by dual averaging, and the mass matrix.

A step size at which proposals are accepted as often as wanted is found by dual averaging (Hoffman and Gelman, 2014),
one for all chains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.chains.kernel import WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_number
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling.initial_positions import normal_around_mode, searches_modes
from knowable.inference.sampling.metric import Metric, Window
from knowable.inference.sampling.sampler import Sampler

_GAMMA, _SLOWEST, _DELAY, _DECAY = 0.05, 0.2, 10.0, 0.75
_STUCK = 0.01  # a smaller acceptance counts as this one
SHORTEST = 20  # transitions of a warm-up that tunes the step size


@dataclass(frozen=True)
class DualAveraging:
    """A step size that is being tuned."""

    log_step: float  # log of the step size to use while tuning
    log_averaged: float  # log of the averaged one, to use afterwards
    error: float  # mean difference between the acceptance wanted and that found
    updates: int  # how often it was updated
    anchor: float  # log of the step size that updates are drawn towards

    @classmethod
    def begin(cls, step: float, *, initial_factor: float = 10.0) -> DualAveraging:
        """From ``step``, drawn towards ``initial_factor`` times it: larger steps are tried first."""
        return cls(math.log(step), math.log(step), 0.0, 0, math.log(initial_factor * step))

    def update(self, acceptances: Iterable[float], target: float, *, chains: int = 1) -> DualAveraging:
        r"""One update for each acceptance probability, the mean over so many ``chains``.

        .. math:: \bar H_t = \Big(1 - \frac{1}{t + t_0}\Big) \bar H_{t-1} + \frac{\delta - \alpha_t}{t + t_0}, \qquad
            \log\epsilon_t = \mu - \frac{\sqrt t}{\gamma} \bar H_t

        The paper's :math:`\gamma = 0.05` is for the noisy acceptances of one chain. With the mean over many chains it
        makes the step size jump by factors of ten, and too long and too short steps waste gradients for as long as the
        warm-up lasts. So :math:`\gamma` grows as the root of their number, up to 0.2.
        """
        gamma = min(_SLOWEST, _GAMMA * math.sqrt(chains))
        log_step, averaged, error, count = self.log_step, self.log_averaged, self.error, self.updates
        for acceptance in acceptances:
            count += 1
            share = 1 / (count + _DELAY)
            error = (1 - share) * error + share * (target - acceptance)
            log_step = self.anchor - math.sqrt(count) / gamma * error
            weight = count**-_DECAY
            averaged = weight * log_step + (1 - weight) * averaged
        return DualAveraging(log_step, averaged, error, count, self.anchor)

    @property
    def current(self) -> float:
        """The step size to use while tuning."""
        return math.exp(self.log_step)

    @property
    def final(self) -> float:
        """The step size to use once tuning has ended."""
        return math.exp(self.log_averaged if self.updates else self.log_step)


def harmonic_mean(acceptance: Tensor) -> float:
    """The mean over chains that a few stuck ones pull down (Hoffman, Radul and Sountsov, 2021).

    At a target of 0.8 some two in a thousand may be stuck.
    """
    return len(acceptance) / (1 / acceptance.double().clamp_min(_STUCK)).sum().item()


def tunes(warmup: WarmUp | None) -> bool:
    """Whether a warm-up is long enough to tune the step; else the first sensible one stays."""
    return warmup is not None and warmup.total >= SHORTEST


def initial_step_size(target: Target, position: Tensor, metric: Metric, *, generator: torch.Generator) -> float:
    """A first step: doubled or halved until one leapfrog step is accepted about half of the time."""
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


# --- samplers whose step size, mass and acceptance rate are settings -------------------------------------------------


def check_tuning(sampler: Any) -> None:
    """Check ``step_size``, ``mass`` and ``target_acceptance``."""
    if sampler.step_size is not None:
        check_number("step_size", sampler.step_size, above=0)
    check_choice("mass", sampler.mass, metrics.CHOICES)
    check_number("target_acceptance", sampler.target_acceptance, above=0, below=1)


def tunes_at_modes(self: Any, dimension: int) -> bool:
    """A sampler's ``begins_near_modes``: where step size and a dense mass are tuned."""
    tuned = self.step_size is None and self.warmup != 0
    return tuned and metrics.kind_for(self.mass, dimension) == "dense" and searches_modes(dimension)


def begin(
    target: Target, position: Tensor, sampler: Sampler, kind: str, *, generator: torch.Generator
) -> dict[str, Any]:
    """The fields of a :class:`~knowable.inference.sampling.metric.MetricState` of chains that begin at ``position``.

    The mass matrix is 1, or fits the curvature at the mode.
    """
    value, gradient = target.value_and_grad(position)
    inverse_mass = metrics.initial(kind, position)
    if sampler.begins_near_modes(position.shape[1]):
        normal = normal_around_mode(target, position, generator=generator)
        inverse_mass = inverse_mass if normal is None else (normal.factor @ normal.factor.T).to(position)
    return {
        "position": position, "value": value, "gradient": gradient, "inverse_mass": inverse_mass,
        "window": Window.open(position, dense=kind == "dense"),
    }  # fmt: skip
