"""What samplers that follow the gradient share: a step size and a mass that are given, or tuned in the warm-up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.kernel import State
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_number
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling import step_size as steps
from knowable.inference.sampling.metric import Metric
from knowable.inference.sampling.normal_start import BeginsNearModes, normal_around_mode


@dataclass(frozen=True, repr=False)
class TunedSampler(BeginsNearModes):
    """A sampler with a step size, a mass, and an acceptance that the step is tuned to.

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        step_size: One step, or None to tune it.
        mass: ``"diagonal"``, ``"dense"``, ``"identity"``, or ``"auto"``: dense up to 100 dimensions, diagonal beyond.
        target_acceptance: Acceptance probability the step size is tuned to.
    """

    step_size: float | None = None
    mass: str = "auto"
    target_acceptance: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None:
            check_number("step_size", self.step_size, above=0)
        check_choice("mass", self.mass, metrics.CHOICES)
        check_number("target_acceptance", self.target_acceptance, above=0, below=1)

    def looks_for_modes(self, dimension: int) -> bool:
        """Whether chains begin near modes and with their curvature: where step and a dense mass are tuned."""
        tunes = self.step_size is None and self.warmup != 0
        return tunes and self.mass_for(dimension) == "dense" and super().looks_for_modes(dimension)

    def mass_for(self, dimension: int) -> str:
        """The kind of mass in so many dimensions."""
        return metrics.kind_for(self.mass, dimension)


def begin(target: Target, position: Tensor, sampler: TunedSampler, *, generator: torch.Generator) -> State:
    """The state of chains that begin at ``position`` ``(C, D)``: with a mass of 1, or one that fits the mode."""
    value, gradient = target.value_and_grad(position)
    dimension = position.shape[1]
    kind = sampler.mass_for(dimension)
    inverse_mass = metrics.initial(kind, position)
    if sampler.looks_for_modes(dimension):
        normal = normal_around_mode(target, position, generator=generator)
        inverse_mass = inverse_mass if normal is None else (normal.factor @ normal.factor.T).to(position)
    state = {"position": position, "value": value, "gradient": gradient, "inverse_mass": inverse_mass}
    metrics.open_window(state, kind)
    return state


def sensible_step(target: Target, state: State, generator: torch.Generator) -> float:
    """A leapfrog step that is about right where the chains are, in the units of their metric."""
    return steps.sensible(target, state["position"], Metric(state["inverse_mass"]), generator=generator)
