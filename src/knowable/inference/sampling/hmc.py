"""Hamiltonian Monte Carlo (Duane et al., 1987; Neal, 2011), with a trajectory length that tunes itself (ChEES)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Gradient
from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count, check_type
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling import step_size as steps
from knowable.inference.sampling import trajectory_length as lengths
from knowable.inference.sampling.metric import Metric, velocity
from knowable.inference.sampling.tuning import TunedSampler, begin, sensible_step


@dataclass(frozen=True, repr=False)
class HMC(TunedSampler):
    r"""Chains that follow the gradient along Hamiltonian trajectories, all chains in step.

    .. math:: H(\theta, p) = -\log p(D, \theta) + \tfrac12 p^\top \Sigma p

    A trajectory of leapfrog steps is proposed and accepted with probability :math:`\min(1, e^{-\Delta H})`. In the
    warm-up the step size is tuned by dual averaging, the mass by the spread within chains, and the trajectory length by
    ChEES (Hoffman, Radul and Sountsov, 2021), the change in the estimator of the expected square: it makes the squared
    distance from the mean change as much as possible. Lengths are jittered by a Halton sequence, the same for all
    chains, so that no direction is traversed a whole number of times.

    Args:
        chains: This and the other fields of :class:`~knowable.core.chains.settings.Sampling` say how chains are run.
        step_size: Leapfrog step, or None to tune it.
        mass: ``"diagonal"``, ``"dense"``, ``"identity"``, or ``"auto"``: dense up to 100 dimensions, diagonal beyond.
        target_acceptance: Acceptance probability the step size is tuned to, as a harmonic mean over chains: a few that
            are stuck count for much.
        steps: Leapfrog steps of a trajectory, the mean where they are jittered, or None to tune it.
        jitter: Whether trajectory lengths vary evenly between 0 and twice the mean, and every fifth has smaller steps
            so that no chain is stuck for long where the density is narrow; or all are the same.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.HMC(chains=4, draws=100).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([4, 100, 2])
    """

    family = "sampling"
    summary = "Hamiltonian trajectories of a length that tunes itself, all chains in step"
    references = ("duane1987", "neal2011", "hoffman2021")

    steps: int | None = None
    jitter: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None:
            check_count("steps", self.steps)
        check_type("jitter", self.jitter, bool, "True or False")

    def kernel(self, dimension: int) -> HMCKernel:
        """The transition."""
        return HMCKernel(self, self.mass_for(dimension))


_FIRST_STEPS = 4  # of a trajectory, before its length is tuned


@dataclass(frozen=True)
class HMCKernel(Kernel):
    """Trajectories of the same number of leapfrog steps for all chains."""

    settings: HMC
    mass: str
    most_steps: int = 1000

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin, before any tuning."""
        state = begin(target, position, self.settings, generator=generator)
        first = self.settings.step_size or sensible_step(target, state, generator)
        return {
            **state,
            "step": steps.begin(first),
            "length": lengths.begin(first * (self.settings.steps or _FIRST_STEPS)),
            "centre": position.clone(),
            "transitions": torch.zeros((), dtype=torch.int64),
        }

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` trajectories of every chain."""
        state = dict(state)
        metric = Metric(state["inverse_mass"])
        found = []
        for i in target.in_time(n):
            number = int(state["transitions"])
            share = lengths.halton(number + 1) if self.settings.jitter else 0.5
            step = self._step(state, warmup)
            count = self._count(state, step, share, warmup)
            careful = warmup is None and self.settings.jitter and number % CAREFUL_EVERY == 0
            step = step * CAREFULLY if careful else step
            noise = torch.randn(
                state["position"].shape, generator=generator, dtype=state["position"].dtype,
                device=state["position"].device,
            )  # fmt: skip
            proposal = trajectory(target, metric, state, noise, step, count)
            uniform = torch.rand(len(noise), generator=generator, dtype=noise.dtype, device=noise.device)
            accepted = uniform < proposal["acceptance"]
            if warmup is not None:
                self._tune(state, proposal, metric, share, warmup.first + i, warmup.total)
            for name in ("position", "gradient", "value"):
                chosen = accepted.unsqueeze(-1) if state[name].dim() == 2 else accepted
                state[name] = torch.where(chosen, proposal[name], state[name])
            state["transitions"] = state["transitions"] + 1
            before, here = state["inverse_mass"], state["position"].unsqueeze(0)
            if warmup is not None and metrics.learn(state, self.mass, here, warmup.first + i, warmup.total):
                metric = Metric(state["inverse_mass"])
                early = warmup.first + i < metrics.window_opens(warmup.total)
                self._start_again(target, state, before, generator, early=early)
            info = {
                "acceptance": proposal["acceptance"], "diverging": proposal["diverging"].to(noise.dtype),
                "energy": proposal["energy"], "steps": torch.full_like(proposal["acceptance"], count),
            }  # fmt: skip
            found.append((state["position"], state["value"], info))
        return state, Block.stack(found)

    def tuned(self, state: State) -> dict[str, float]:
        """Step size and trajectory length."""
        step = self._step(state, None)
        return {"step_size": step, "trajectory_steps": float(self._count(state, step, 0.5, None))}

    # --- one transition ----------------------------------------------------------------------------------------------

    def _step(self, state: State, warmup: WarmUp | None) -> float:
        if self.settings.step_size is not None:
            return self.settings.step_size
        return steps.current(state["step"]) if warmup is not None else steps.final(state["step"])

    def _count(self, state: State, step: float, share: float, warmup: WarmUp | None) -> int:
        """Leapfrog steps of a trajectory that is ``2 share`` times the mean length."""
        if self.settings.steps is not None:
            return max(1, math.ceil((2 * share if self.settings.jitter else 1.0) * self.settings.steps))
        length = lengths.length(state["length"], tuning=warmup is not None)
        return max(1, min(self.most_steps, math.ceil(2 * share * length / step)))

    # --- warm-up -----------------------------------------------------------------------------------------------------

    def _tune(self, state: State, proposal: State, metric: Metric, share: float, number: int, total: int) -> None:
        settings = self.settings
        if settings.step_size is None and total >= steps.SHORTEST:
            acceptance = steps.harmonic_mean(proposal["acceptance"])
            state["step"] = steps.update(state["step"], [acceptance], settings.target_acceptance)
        if settings.steps is None and number >= total // 10:  # the step has to be about right before
            before, after = (metric.whiten(each["position"] - state["centre"]) for each in (state, proposal))
            state["length"] = lengths.update(
                state["length"], before, after, metric.whiten(proposal["velocity"]), proposal["acceptance"],
                share=share, step=steps.final(state["step"]),
            )  # fmt: skip
        state["centre"] = lengths.running_mean(state["centre"], state["position"], number)

    def _start_again(
        self, target: Target, state: State, before: Tensor, generator: torch.Generator, *, early: bool
    ) -> None:
        """Step and length in the units of a new metric: the step is found anew; so is the length, if it is early."""
        if self.settings.step_size is not None:
            return
        step = sensible_step(target, state, generator)
        state["step"] = steps.begin(step, boldness=2.0)
        length = lengths.length(state["length"], tuning=False) / metrics.relative(state["inverse_mass"], before)
        state["length"] = lengths.begin(_FIRST_STEPS * step if early else max(length, step))


def trajectory(target: Target, metric: Metric, state: State, noise: Tensor, step: float, count: int) -> State:
    """``count`` leapfrog steps of every chain from fresh momenta, and the probability of accepting where they end."""
    position, gradient = state["position"], state["gradient"]
    momentum = metric.momentum(noise)
    energy = metric.kinetic(momentum) - state["value"]
    value = state["value"]
    leap, shared = FusedStep(target, leapfrog), (torch.tensor(step).to(noise), metric.inverse_mass)
    for _ in range(count):
        position, momentum, gradient, value = leap((position, momentum, gradient), shared)
    change = metric.kinetic(momentum) - value - energy
    good = torch.isfinite(change) & torch.isfinite(position).all(-1) & torch.isfinite(gradient).all(-1)
    acceptance = torch.where(good, (-change).clamp_max(0.0).exp(), 0.0)
    whole = good.unsqueeze(-1)
    return {
        "position": torch.where(whole, position, state["position"]),
        "value": torch.where(good, value, state["value"]),
        "gradient": torch.where(whole, gradient, state["gradient"]),
        "velocity": torch.where(whole, metric.velocity(momentum), 0.0),
        "acceptance": acceptance,
        "diverging": ~good | (change > DIVERGED),
        "energy": energy,
    }


# --- A step of Hamiltonian dynamics: the leapfrog, which is reversible and keeps volumes -----------------------------
#
# Once the step size is tuned, every fifth trajectory has a quarter of it: that frees chains that are stuck where the
# density is narrow and every longer step is refused.

CAREFUL_EVERY, CAREFULLY = 5, 0.25
DIVERGED = 1000.0  # energy error in nats beyond which a trajectory has left the Hamiltonian's surface


def leapfrog(
    value_and_grad: Gradient, position: Tensor, momentum: Tensor, gradient: Tensor, step: Tensor, inverse_mass: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Half a step of the momentum, one of the position, and the other half."""
    half = momentum + 0.5 * step * gradient
    position = position + step * velocity(half, inverse_mass)
    value, gradient = value_and_grad(position)
    return position, half + 0.5 * step * gradient, gradient, value
