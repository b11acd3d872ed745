r"""What the stochastic-gradient samplers share: how they are set, run and tuned.

None of them tests its steps, so all of them are biased by the step size and by the noise of mini-batches. Where the
user leaves the step size open, the warm-up chooses it such that both are small, in coordinates in which the posterior
has about the same standard deviation in every direction.

With exact gradients the warm-up makes Metropolis-adjusted trajectories, which explore fast and cannot diverge; in its
last tenth it finds the step size at which a single leapfrog step, were it tested, would be accepted 98% of the time.
With mini-batches the warm-up makes the sampler's own steps. The variance V of the batch gradients is measured from
pairs of batches at the same position; steps are so small that batches bring at most a fifth of the noise, and as much
less is injected.

The inverse mass Σ is an estimate of the posterior covariance. For a normal posterior the gradients of its log density
have covariance :math:`\Sigma^{-1}`, so that positions and gradients together say more than positions alone:

.. math:: \hat\Sigma = \mathrm{Cov}(\theta)\ \#\ \mathrm{Cov}(\nabla \log p)^{-1}, \qquad
    A \# B = A^{1/2} (A^{-1/2} B A^{-1/2})^{1/2} A^{1/2}

the geometric mean, which minimises the Fisher divergence to a normal (Seyboldt, Carlson and Carpenter, 2026). It is
right even where the chains have moved over a small part of the posterior only: the extent of the part cancels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.chains.fused_step import FusedStep, Step
from knowable.core.chains.kernel import Block, Info, Kernel, State, WarmUp
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import fast_randn, raw_noise
from knowable.inference.sampling import metric as metrics
from knowable.inference.sampling.hmc import accept, trajectory
from knowable.inference.sampling.metric import Metric, Window, pull
from knowable.inference.sampling.mini_batches import MiniBatches, batch_seed
from knowable.inference.sampling.tuning import DualAveraging, initial_step_size

_EXPLORING, _ACCURATE = 0.8, 0.98  # acceptance of trajectories, and of the single steps that follow them
_SHARE = 0.2  # of the noise may come from batches
_FIRST = 0.5  # leapfrog step to begin with in coordinates of unit standard deviation

Run = Callable[[Any, MiniBatches, int, int], Any]
"""``run(state, batches, first, count) -> state``: steps ``first`` to ``first + count - 1``."""

Stage = tuple[int, float, float]
"""How many steps, at how many times the step size ε, with how many times the noise."""


def check_settings(sampler: Any) -> None:
    """Check ``step_size``, ``steps``, ``batch_size`` and ``mass``."""
    if sampler.step_size is not None:
        check_number("step_size", sampler.step_size, above=0)
    check_count("steps", sampler.steps)
    if sampler.batch_size is not None:
        check_count("batch_size", sampler.batch_size)
    check_choice("mass", sampler.mass, metrics.CHOICES)


def mass_for(sampler: Any, dimension: int) -> str:
    """``"identity"``, ``"diagonal"`` or ``"dense"``."""
    given = sampler.mass == "auto" and sampler.step_size is not None
    return "identity" if given else metrics.kind_for(sampler.mass, dimension)


@dataclass(frozen=True, kw_only=True)
class LangevinState(State):
    """The state of a stochastic-gradient sampler."""

    gradient: Tensor  # at the position, of the last batch, (C, D)
    inverse_mass: Tensor  # Σ, (D,) or (D, D)
    batch_seed: int  # seed of all batches
    batch_step: int  # number of the next batch
    drawn: int = 0  # transitions since the warm-up
    taken: int = 0  # their steps
    noise: Tensor  # variance of the batch gradients in coordinates of unit standard deviation, (D,)
    noise_count: int = 0  # pairs of batches it was measured from
    step: DualAveraging | None = None  # the step size; None where the user gave it
    window: Window | None = None  # positions and gradients of the present window of the warm-up; None: not tuned


def repeated(step: Step, shared: Sequence[float | Tensor], carried: tuple[str, ...]) -> Run:
    """Steps ``(value_and_grad, *carried, raw noise, *shared) -> (*carried, value)``, one after the other."""

    def run(state: Any, batches: MiniBatches, first: int, count: int) -> Any:
        tensors, position = tuple(getattr(state, name) for name in carried), state.position
        constants = tuple(torch.as_tensor(each, dtype=position.dtype, device=position.device) for each in shared)
        fused, value = FusedStep(batches.current, step), state.value
        for number in range(first, first + count):
            batches.of_step(number)
            *found, value = fused((*tensors, raw_noise(*position.shape, like=position)), constants)
            tensors = tuple(found)
        return replace(state, **dict(zip(carried, tensors, strict=True)), value=value)

    return run


@dataclass
class LangevinKernel(Kernel):
    """Transitions of ``steps`` untested steps each, of which the last position is the draw."""

    settings: Any  # the sampler
    kind: str  # of the mass matrix: "identity", "diagonal" or "dense"
    plan: Callable[[Any], list[Stage]] | None = None  # of the next transition; None is ``steps`` equal steps
    largest: ClassVar[float]  # leapfrog step with exact gradients, in coordinates of unit standard deviation
    state_type: ClassVar[type[LangevinState]] = LangevinState

    # --- what a sampler defines --------------------------------------------------------------------------------------

    @abstractmethod
    def dynamics(self, state: Any, factor: float = 1.0, *, noise: float = 1.0, leapfrog: float | None = None) -> Run:
        """The sampler's steps, of ``leapfrog`` or as tuned, at ``factor`` times ε and ``noise`` times the noise."""

    @abstractmethod
    def given(self, step_size: float) -> float:
        """The leapfrog step that the user's step size amounts to on the tempered density."""

    @abstractmethod
    def batch_noise(self, variance: Tensor, leapfrog: float) -> Tensor:
        """The share of the noise that batch gradients of this variance bring, for each coordinate."""

    @abstractmethod
    def step_for_noise(self, variance: float, share: float) -> float:
        """The leapfrog step at which that is ``share``."""

    @abstractmethod
    def reported(self, leapfrog: float) -> float:
        """The step size in the sampler's own terms."""

    @abstractmethod
    def own_state(self, position: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """The fields that the sampler's state adds."""

    def learned(self, state: Any) -> Tensor | None:
        """The inverse mass at the end of a window, or None to keep what there is."""
        return None if self.kind == "identity" or state.window is None else estimate(state.window)

    # --- the kernel --------------------------------------------------------------------------------------------------

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> Any:
        """Where the chains begin, before any tuning."""
        inverse_mass, seed = metrics.initial(self.kind, position), batch_seed(generator)
        batches = MiniBatches(target, self.settings.batch_size, seed)
        value, gradient = batches.gradient(position, 0)
        step = window = None
        if self.settings.step_size is None:
            first = initial_step_size(batches.current, position, Metric(inverse_mass), generator=generator)
            step = DualAveraging.begin(0.25 * first)  # from accepted half of the time to nearly always
            window = Window.open(position, gradient, dense=self.kind == "dense")
        fields: dict[str, Any] = self.own_state(position, gradient)
        return self.state_type(
            position=position.clone(), value=value, gradient=gradient, inverse_mass=inverse_mass, batch_seed=seed,
            batch_step=1, noise=torch.zeros(position.shape[1], dtype=torch.float64, device=position.device), step=step,
            window=window, **fields,
        )  # fmt: skip

    def advance(
        self, target: Target, state: Any, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[Any, Block]:
        """``n`` transitions of every chain."""
        batches = MiniBatches(target, self.settings.batch_size, state.batch_seed)
        shape = state.position.shape
        positions, values = state.position.new_empty((n, *shape)), state.value.new_empty((n, shape[0]))
        steps = torch.empty_like(values)
        runs: dict[tuple[float, float], Run] = {}
        made = 0
        for i in target.in_time(n):
            before = state.batch_step
            if warmup is None or self.settings.step_size is not None:
                state = self._transition(state, batches, runs)
                if warmup is None:
                    taken = state.taken + state.batch_step - before
                    state = replace(state, drawn=state.drawn + 1, taken=taken)
            elif batches.exact:
                state = self._explore(target, state, warmup.first + i, warmup.total, generator)
            else:
                state = self._approach(state, batches, warmup.first + i, warmup.total)
            positions[i], values[i], steps[i] = state.position, state.value, state.batch_step - before
            made = i + 1
        return state, Block(positions[:made], values[:made], Info(steps=steps[:made]))

    def tuned(self, state: Any) -> dict[str, float]:
        """Step size, and the share of the noise that batches bring."""
        leapfrog = self.leapfrog(state)
        found = {"step_size": self.reported(leapfrog)}
        if state.noise_count:
            found["batch_noise"] = self.batch_noise(state.noise, leapfrog).mean().item()
        return found

    def leapfrog(self, state: Any) -> float:
        """The step in the units of a leapfrog step."""
        if self.settings.step_size is not None:
            return self.given(self.settings.step_size)
        return self._limited(state, state.step.final)

    def _limited(self, state: Any, leapfrog: float) -> float:
        """No larger than what the bias allows: of the step itself, and of the noise of batches."""
        if not state.noise_count:
            return min(leapfrog, self.largest)
        return min(leapfrog, self.step_for_noise(state.noise.mean().item(), _SHARE))

    def injected(self, state: Any, leapfrog: float) -> Tensor:
        """The share of the noise that is left to inject, ``(D,)``: what batches do not bring."""
        return (1 - self.batch_noise(state.noise, leapfrog)).clamp_min(0.0).to(state.position)

    def _transition(self, state: Any, batches: MiniBatches, runs: dict[tuple[float, float], Run]) -> Any:
        plan = [(self.settings.steps, 1.0, 1.0)] if self.plan is None else self.plan(state)
        for count, factor, noise in plan:
            run = runs.get((factor, noise))
            if run is None:
                runs.clear()
                run = runs[factor, noise] = self.dynamics(state, factor, noise=noise)
            state = run(state, batches, state.batch_step, count)
            state = replace(state, batch_step=state.batch_step + count)
        return state

    # --- warm-up with exact gradients --------------------------------------------------------------------------------

    def _explore(self, target: Target, state: Any, number: int, total: int, generator: torch.Generator) -> Any:
        """A Metropolis-adjusted trajectory, or at the end as many single steps: positions, mass and step size."""
        settled = _settled(total)
        if number == settled:
            state = replace(state, step=DualAveraging.begin(0.3 * state.step.final))
        metric, shape = Metric(state.inverse_mass), state.position.shape
        longest = 2 * self.settings.steps - 1
        count = int(torch.randint(1, longest + 1, (), generator=generator)) if number < settled else 1
        wanted = _EXPLORING if number < settled else _ACCURATE
        for _ in range(1 if number < settled else self.settings.steps):
            noise = fast_randn(*shape, like=state.position)
            proposal = trajectory(target, metric, state, noise, state.step.current, count)
            state = accept(state, proposal, torch.rand(shape[0]).to(proposal.acceptance))
            step = state.step.update([proposal.acceptance.mean().item()], wanted)
            state = replace(state, step=step, batch_step=state.batch_step + count)
        return self._learn(state, number, total)

    # --- warm-up with mini-batches -----------------------------------------------------------------------------------

    def _approach(self, state: Any, batches: MiniBatches, number: int, total: int) -> Any:
        """The sampler's own steps, and a last one that is compared with a leapfrog step on its batch."""
        tuned = state.step
        used = tuned.current
        if number >= metrics.window_opens(total):  # until then reaching the posterior matters more than noise
            used = self._limited(state, used)
        first, count = state.batch_step, self.settings.steps - 1
        if count:
            state = self.dynamics(state, leapfrog=used)(state, batches, first, count)
        batch = batches.current if count else batches.of_step(first - 1)  # that of the state's gradient
        noise = fast_randn(*state.position.shape, like=state.position)
        found = trajectory(batch, Metric(state.inverse_mass), state, noise, used, 1)
        value, gradient = batches.gradient(found.position, first + count)
        measured, pairs = _noise_variance(state, gradient - found.gradient)
        if used > 0.9 * tuned.current:  # it is this criterion that limits the step
            tuned = tuned.update([found.acceptance.mean().item()], _ACCURATE)
        state = replace(
            state, position=found.position, value=value, gradient=gradient, batch_step=first + self.settings.steps,
            noise=measured, noise_count=pairs, step=tuned,
        )  # fmt: skip
        return self._learn(state, number, total)

    # --- either way --------------------------------------------------------------------------------------------------

    def _learn(self, state: Any, number: int, total: int) -> Any:
        """Count positions and gradients; at the end of a window change the coordinates."""
        dense = self.kind == "dense"
        if number == metrics.window_opens(total):
            state = replace(state, window=Window.open(state.position, state.gradient, dense=dense))
        state = replace(state, window=state.window.observe(state.position, state.gradient))
        if number + 1 not in metrics.windows(total):
            return state
        found = self.learned(state)
        if found is not None:
            noise = state.noise if found.dim() == 2 else state.noise * (found / state.inverse_mass).double()
            pairs = min(state.noise_count, 2)  # it is measured again, for coordinates are mixed
            state = replace(state, inverse_mass=found, step=DualAveraging.begin(_FIRST), noise=noise, noise_count=pairs)
        return replace(state, window=Window.open(state.position, state.gradient, dense=dense))


def _noise_variance(state: LangevinState, difference: Tensor) -> tuple[Tensor, int]:
    """Running mean of the variance of batch gradients, from two batches at the same position; and its count."""
    white = pull(difference, Metric(state.inverse_mass).factor).double()
    count = state.noise_count + 1
    weight = max(0.02, 1 / count)
    return state.noise + weight * (0.5 * white.square().mean(0) - state.noise), count


def _settled(total: int) -> int:
    """The transition of the warm-up after which coordinates no longer change and the step size settles."""
    ends = metrics.windows(total)
    return ends[-1] if ends else total - math.ceil(0.5 * total)


def estimate(seen: Window) -> Tensor | None:
    """The inverse mass that the positions and gradients of a window suggest; None if there are too few."""
    assert seen.gradient is not None
    if not seen.enough:
        return None
    positions, gradients = (each.within(seen.count)[0] for each in (seen.position, seen.gradient))
    dense = positions.dim() == 2
    spread, slope = (positions.diagonal(), gradients.diagonal()) if dense else (positions, gradients)
    good = torch.isfinite(spread) & torch.isfinite(slope) & (spread > 0) & (slope > 0)
    if not good.all():
        return None
    variance = (spread / slope).sqrt()
    if dense:
        variance = _geometric_mean(positions, gradients, variance.sqrt(), seen.position.freedom(seen.count))
    return variance.to(seen.position.origin)


def _geometric_mean(positions: Tensor, gradients: Tensor, scale: Tensor, freedom: float) -> Tensor:
    """Of one covariance and the inverse of the other; correlations that few draws support are shrunk."""
    trust = 1 - (len(scale) / (freedom + len(scale))) ** 2

    def root(matrix: Tensor, power: float) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return vectors * values.clamp_min(1e-12 * values[-1]) ** power @ vectors.T

    def shrunk(matrix: Tensor) -> Tensor:
        return trust * matrix + (1 - trust) * matrix.diagonal().diag()

    a, b = shrunk(positions / scale.outer(scale)), shrunk(gradients * scale.outer(scale))
    half, inverse_half = root(a, 0.5), root(a, -0.5)
    middle = root(inverse_half @ root(b, -1.0) @ inverse_half, 0.5)
    mean = half @ middle @ half
    return 0.5 * (mean + mean.T) * scale.outer(scale)
