r"""What the stochastic-gradient samplers share: how they are set, run and tuned.

None of them tests its steps, so all of them are biased by the size of the step and by the noise of mini-batches. Where
the user leaves the step open, the warm-up chooses it such that both are small, in coordinates in which the posterior is
about as wide in every direction (see :mod:`~knowable.inference.sampling.preconditioner`).

With exact gradients the warm-up makes Metropolis-adjusted trajectories, which explore fast and cannot diverge; in its
last tenth it finds the step at which a single leapfrog step, were it tested, would be accepted 98% of the time. With
mini-batches the warm-up makes the sampler's own steps. The variance V of the batch gradients is measured from pairs of
batches at the same place; steps are so small that batches bring at most a fifth of the noise, and as much less is
injected. The batches of a loader are not independent (rows that came early in an epoch are missing later, which cancels
most of the noise): there nothing is taken off.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Step
from knowable.core.chains.kernel import Block, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import fast_randn, raw_noise
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling import mini_batches, preconditioner
from knowable.inference.sampling import step_size as steps
from knowable.inference.sampling.hmc import trajectory
from knowable.inference.sampling.metric import Metric
from knowable.inference.sampling.mini_batches import MiniBatches
from knowable.inference.sampling.sampler import Sampler

_EXPLORING, _ACCURATE = 0.8, 0.98  # acceptance of trajectories, and of the single steps that follow them
_SHARE = 0.2  # of the noise may come from batches
_FIRST = 0.5  # leapfrog step to begin with in coordinates of unit width

Run = Callable[[State, MiniBatches, int, int], None]
"""``run(state, batches, first, count)``: steps ``first`` to ``first + count - 1``, which change the state."""

Stage = tuple[int, float, float]
"""How many steps, at how many times the step size ε, with how many times the noise."""


@dataclass(frozen=True, repr=False)
class StochasticGradientSampler(Sampler):
    """Chains that follow a gradient, perhaps of a mini-batch, and add noise. Each sampler documents the fields."""

    step_size: float | None = None
    steps: int = 10
    batch_size: int | None = None
    mass: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_size is not None:
            check_number("step_size", self.step_size, above=0)
        check_count("steps", self.steps)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        check_choice("mass", self.mass, metrics.CHOICES)

    def mass_for(self, dimension: int) -> str:
        """``"identity"``, ``"diagonal"`` or ``"dense"``."""
        given = self.mass == "auto" and self.step_size is not None
        return "identity" if given else metrics.kind_for(self.mass, dimension)


def repeated(step: Step, shared: Sequence[float | Tensor], carried: tuple[str, ...]) -> Run:
    """Steps ``(value_and_grad, *carried, raw noise, *shared) -> (*carried, value)``, one after the other."""

    def run(state: State, batches: MiniBatches, first: int, count: int) -> None:
        tensors, position = tuple(state[name] for name in carried), state["position"]
        constants = tuple(torch.as_tensor(each, dtype=position.dtype, device=position.device) for each in shared)
        fused, value = FusedStep(batches.current, step), state["value"]
        for number in range(first, first + count):
            batches.of_step(number)
            *found, value = fused((*tensors, raw_noise(*position.shape, like=position)), constants)
            tensors = tuple(found)
        state.update(zip(carried, tensors, strict=True), value=value)

    return run


@dataclass
class LangevinKernel(Kernel):
    """Transitions of ``steps`` untested steps each, of which the last position is the draw."""

    settings: StochasticGradientSampler
    kind: str
    widest: ClassVar[float]  # largest leapfrog step with exact gradients, in coordinates of unit width
    _batches: MiniBatches | None = field(
        default=None, init=False, repr=False
    )  # which come follows from the state alone

    # --- what a sampler defines --------------------------------------------------------------------------------------

    @abstractmethod
    def dynamics(self, state: State, factor: float = 1.0, *, noise: float = 1.0, leapfrog: float | None = None) -> Run:
        """The sampler's steps, of ``leapfrog`` or as tuned, at ``factor`` times ε and ``noise`` times the noise."""

    @abstractmethod
    def given(self, step_size: float) -> float:
        """The leapfrog step that the user's step size amounts to on the tempered density."""

    @abstractmethod
    def batch_noise(self, variance: Tensor, leapfrog: float) -> Tensor:
        """The part of the noise that batch gradients of this variance bring, for each coordinate of unit width."""

    @abstractmethod
    def quiet(self, variance: float, share: float) -> float:
        """The leapfrog step at which that part is ``share``."""

    @abstractmethod
    def reported(self, leapfrog: float) -> float:
        """The step size in the sampler's own terms."""

    def plan(self, state: State) -> list[Stage]:
        """The steps of the next transition."""
        return [(self.settings.steps, 1.0, 1.0)]

    def learned(self, state: State) -> Tensor | None:
        """The inverse mass at the end of a window, or None to keep what there is."""
        return None if self.kind == "identity" else preconditioner.estimate(state)

    # --- the kernel --------------------------------------------------------------------------------------------------

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> State:
        """Where the chains begin, before any tuning."""
        state: State = {"position": position.clone(), "inverse_mass": metrics.initial(self.kind, position)}
        mini_batches.begin(state, generator)
        batches = self._stream(target, state)
        state["value"], state["gradient"] = batches.gradient(position, 0)
        state["batch.step"] += 1
        state["drawn"] = torch.zeros((), dtype=torch.int64)  # transitions since the warm-up, and their steps
        state["taken"] = torch.zeros((), dtype=torch.int64)
        state["noise"] = torch.zeros(position.shape[1], dtype=torch.float64, device=position.device)
        state["noise.count"] = torch.zeros((), dtype=torch.int64)
        if self.settings.step_size is None:
            first = steps.sensible(batches.current, position, Metric(state["inverse_mass"]), generator=generator)
            state["step"] = steps.begin(0.25 * first)  # from accepted half of the time to nearly always
            preconditioner.open_window(state, self.kind)
        return state

    def advance(
        self, target: Target, state: State, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[State, Block]:
        """``n`` transitions of every chain."""
        state = {name: value.clone() for name, value in state.items()}
        batches = self._stream(target, state)
        shape = state["position"].shape
        positions, values = state["position"].new_empty((n, *shape)), state["value"].new_empty((n, shape[0]))
        taken = torch.empty_like(values)
        runs: dict[tuple[float, float], Run] = {}
        made = 0
        for i in target.in_time(n):
            before = int(state["batch.step"])
            if warmup is None or self.settings.step_size is not None:
                self._transition(state, batches, runs)
                if warmup is None:
                    state["drawn"] += 1
                    state["taken"] += state["batch.step"] - before
            elif batches.exact:
                self._explore(target, state, warmup.first + i, warmup.total, generator)
            else:
                self._approach(target, state, batches, warmup.first + i, warmup.total)
            positions[i], values[i], taken[i] = state["position"], state["value"], int(state["batch.step"]) - before
            made = i + 1
        return state, Block(positions[:made], values[:made], {"steps": taken[:made]})

    def tuned(self, state: State) -> dict[str, float]:
        """Step size, and the part of the noise that batches bring."""
        leapfrog = self.leapfrog(state)
        found = {"step_size": self.reported(leapfrog)}
        if int(state["noise.count"]):
            found["batch_noise"] = self.batch_noise(state["noise"], leapfrog).mean().item()
        return found

    def leapfrog(self, state: State) -> float:
        """The step in the units of a leapfrog step."""
        if self.settings.step_size is not None:
            return self.given(self.settings.step_size)
        return self._limited(state, steps.final(state["step"]))

    def _limited(self, state: State, leapfrog: float) -> float:
        """No larger than what the bias allows: of the step itself, and of the noise of batches."""
        if not int(state["noise.count"]):
            return min(leapfrog, self.widest)
        return min(leapfrog, self.quiet(state["noise"].mean().item(), _SHARE))

    def injected(self, state: State, leapfrog: float) -> Tensor:
        """The part of the noise that is left to inject, ``(D,)``: what batches do not bring."""
        share = self.batch_noise(state["noise"], leapfrog) if self._corrects else torch.zeros_like(state["noise"])
        return (1 - share).clamp_min(0.0).to(state["position"])

    @property
    def _corrects(self) -> bool:
        return self._batches is not None and self._batches.independent

    def _stream(self, target: Target, state: State) -> MiniBatches:
        if self._batches is None or not self._batches.serves(target, state):
            self._batches = MiniBatches.of(target, self.settings.batch_size, state)
        return self._batches

    def _transition(self, state: State, batches: MiniBatches, runs: dict[tuple[float, float], Run]) -> None:
        for count, factor, noise in self.plan(state):
            run = runs.get((factor, noise))
            if run is None:
                runs.clear()
                run = runs[factor, noise] = self.dynamics(state, factor, noise=noise)
            run(state, batches, int(state["batch.step"]), count)
            state["batch.step"] += count

    # --- warm-up with exact gradients --------------------------------------------------------------------------------

    def _explore(self, target: Target, state: State, number: int, total: int, generator: torch.Generator) -> None:
        """A trajectory that is tested, or at the end as many single steps: positions, mass and step size."""
        settled = _settled(total)
        if number == settled:
            state["step"] = steps.begin(0.3 * steps.final(state["step"]))
        metric, shape = Metric(state["inverse_mass"]), state["position"].shape
        longest = 2 * self.settings.steps - 1
        count = int(torch.randint(1, longest + 1, (), generator=generator)) if number < settled else 1
        for _ in range(1 if number < settled else self.settings.steps):
            proposal = trajectory(
                target, metric, state, fast_randn(*shape, like=state["position"]), steps.current(state["step"]), count
            )
            accepted = torch.rand(shape[0]).to(proposal["acceptance"]) < proposal["acceptance"]
            for name in ("position", "gradient", "value"):
                chosen = accepted.unsqueeze(-1) if state[name].dim() == 2 else accepted
                state[name] = torch.where(chosen, proposal[name], state[name])
            wanted = _EXPLORING if number < settled else _ACCURATE
            state["step"] = steps.update(state["step"], [proposal["acceptance"].mean().item()], wanted)
            state["batch.step"] += count
        self._learn(state, number, total)

    # --- warm-up with mini-batches -----------------------------------------------------------------------------------

    def _approach(self, target: Target, state: State, batches: MiniBatches, number: int, total: int) -> None:
        """The sampler's own steps, and a last one that is held against a leapfrog step on its batch."""
        tuned = state["step"]
        used = steps.current(tuned)
        if number >= metrics.window_opens(total):  # until then the way to the posterior matters more than noise
            used = self._limited(state, used)
        step, count = int(state["batch.step"]), self.settings.steps - 1
        if count:
            self.dynamics(state, leapfrog=used)(state, batches, step, count)
        noise = fast_randn(*state["position"].shape, like=state["position"])
        found = trajectory(batches.current, Metric(state["inverse_mass"]), state, noise, used, 1)
        state["position"] = found["position"]
        state["value"], state["gradient"] = batches.gradient(state["position"], step + count)
        state["batch.step"] += self.settings.steps
        self._measure_noise(state, state["gradient"] - found["gradient"])
        if used > 0.9 * steps.current(tuned):  # it is this criterion that limits the step
            state["step"] = steps.update(tuned, [found["acceptance"].mean().item()], _ACCURATE)
        self._learn(state, number, total)

    def _measure_noise(self, state: State, difference: Tensor) -> None:
        """Running mean of the variance of batch gradients, from two batches at the same place."""
        white = Metric(state["inverse_mass"]).pull(difference).double()
        state["noise.count"] += 1
        weight = max(0.02, 1 / int(state["noise.count"]))
        state["noise"] += weight * (0.5 * white.square().mean(0) - state["noise"])

    # --- either way --------------------------------------------------------------------------------------------------

    def _learn(self, state: State, number: int, total: int) -> None:
        """Watch positions and gradients; at the end of a window change the coordinates."""
        if number == metrics.window_opens(total):
            preconditioner.open_window(state, self.kind)
        preconditioner.observe(state)
        if number + 1 in metrics.windows(total):
            found = self.learned(state)
            if found is not None:
                old = state["inverse_mass"]
                state["inverse_mass"] = found
                state["step"] = steps.begin(_FIRST)
                state["noise"], state["noise.count"] = _rescaled(state, old, found)
            preconditioner.open_window(state, self.kind)


def _settled(total: int) -> int:
    """The transition of the warm-up after which coordinates no longer change and the step size settles."""
    ends = metrics.windows(total)
    return ends[-1] if ends else total - math.ceil(0.5 * total)


def _rescaled(state: State, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The variance of batch gradients in the new coordinates; it is measured anew where they are mixed."""
    count = state["noise.count"].clamp_max(2)
    return (state["noise"] if new.dim() == 2 else state["noise"] * (new / old).double()), count
