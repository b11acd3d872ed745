"""Stochastic-gradient Langevin dynamics (Welling and Teh, 2011), and its preconditioned form (Li et al., 2016)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.fused_step import Gradient
from knowable.core.support.checks import check_choice, check_number, check_type
from knowable.core.support.randomness import noise_from, raw_noise
from knowable.errors import InvalidArgument
from knowable.inference.sampling.metric import Metric, pull
from knowable.inference.sampling.metric import spread as move_by
from knowable.inference.sampling.mini_batches import MiniBatches
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.stochastic_gradient import (
    LangevinKernel,
    LangevinState,
    Run,
    Stage,
    check_settings,
    mass_for,
    repeated,
)

SCHEDULES = ("constant", "decreasing")
_DELAY = 1000.0  # steps after which a decreasing step begins to fall
_STEEPEST = 10.0  # drift of a tuned step, in standard deviations of its noise


@dataclass(frozen=True, repr=False, kw_only=True)
class SGLD(Sampler):
    r"""Gradient steps with noise that makes the iterates draws from the posterior.

    .. math:: \theta' = \theta + \tfrac{\epsilon}{2} \Sigma \nabla \log p(D, \theta)
        + \sqrt{\epsilon T}\, \Sigma^{1/2} \xi

    with :math:`\Sigma = I` where the step size is given. For large networks ξ has the first five moments of a normal
    and is quicker to draw (:func:`~knowable.core.support.randomness.noise_from`). Steps are not tested, which is a bias
    that is known for a normal posterior of variance s² along a direction: its draws have variance

    .. math:: s^2\, \frac{1 + \epsilon V / 4}{1 - \epsilon / (4 s^2)}

    where V is the variance of the gradient's noise, zero unless it comes from mini-batches. By default the warm-up
    finds Σ, an estimate of the posterior covariance, and the step: at most 0.1, which makes variances 2.5% too large
    where the posterior is normal, and less where a Metropolis test would refuse more than one step in fifty. What
    batches bring is measured (``diagnostics.terms["batch_noise"]``), kept to a fifth of the noise and taken off the
    noise injected. A drift of more than ten standard deviations of the noise is clipped, so that a chain where the
    density is narrow is not thrown out. Posteriors with narrow tails lose part of them: in the neck of Neal's funnel
    (scale 1.5) the lowest tenth of v gets 7.4% of the draws, and 47% are below its median.

    Draws are ``steps`` steps apart. With the schedule ``"decreasing"``,

    .. math:: \epsilon_t = \epsilon\, (1 + t / 1000)^{-\gamma}

    the bias dies out. A draw stands for as much time :math:`\sum_t \epsilon_t` as any other, with more steps between
    later draws, so that all have the same weight.

    With ``preconditioned`` the step of each coordinate follows the size of its recent gradients (RMSprop), pooled over
    chains, also after the warm-up:

    .. math:: v' = 0.99\, v + 0.01\, g^2, \qquad \Sigma = \mathrm{diag}\,(10^{-5} + \sqrt{v})^{-1}

    The term :math:`\tfrac12\sum_j \partial \Sigma_{ij} / \partial \theta_j` that a Σ which depends on θ calls for is
    left out, as is usual: in one dimension, without memory, draws then come from :math:`p(\theta)\,\Sigma(\theta)^{-1}`
    and not from :math:`p(\theta)`. The long memory of v, and pooling, make Σ nearly constant and this bias small. The
    noise of batches is not corrected here.

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
        step_size: ε, or None to tune it in the warm-up.
        steps: Steps of a transition; its last position is the draw.
        batch_size: Rows of a step, or None for all rows up to 1,024 and 128 beyond.
        mass: Σ: ``"dense"``, ``"diagonal"`` or ``"identity"``; ``"auto"`` is dense up to 100 dimensions and diagonal
            beyond, and the identity where ``step_size`` is given.
        schedule: ``"constant"`` or ``"decreasing"``.
        decay: γ of the decreasing schedule; 1/3 gives the fastest convergence (Teh, Thiery and Vollmer, 2016).
        preconditioned: Whether Σ follows the gradients instead.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.SGLD(chains=8, draws=400).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([8, 400, 2])
    """

    family = "sampling"
    summary = "mini-batch gradient steps with noise that makes them draws"
    references = ("welling2011", "li2016")

    step_size: float | None = None
    steps: int = 10
    batch_size: int | None = None
    mass: str = "auto"
    schedule: str = "constant"
    decay: float = 1 / 3
    preconditioned: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_number("decay", self.decay, above=0, at_most=1)
        check_type("preconditioned", self.preconditioned, bool, "True or False")
        if self.preconditioned and self.mass != "auto":
            raise InvalidArgument(
                f"preconditioned=True follows the gradients and leaves no choice of mass, got mass={self.mass!r}."
            )

    def kernel(self, dimension: int) -> SGLDKernel:
        """The transition."""
        kind = "diagonal" if self.preconditioned else mass_for(self, dimension)
        return SGLDKernel(self, kind, None if self.schedule == "constant" else partial(decreasing_steps, self))


@dataclass(frozen=True, kw_only=True)
class SGLDState(LangevinState):
    """With a preconditioner that follows the gradients: also the running mean of their squares, ``(D,)``."""

    squares: Tensor | None = None


@dataclass
class SGLDKernel(LangevinKernel):
    """Euler-Maruyama steps of the Langevin diffusion, one gradient each."""

    settings: SGLD
    memory: float = 0.99  # of the preconditioner that follows the gradients
    damping: float = 1e-5
    largest: ClassVar[float] = math.sqrt(0.1)
    state_type = SGLDState

    def own_state(self, position: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """The squares of the gradients, for the preconditioner that follows them."""
        return {"squares": gradient.square().mean(0)} if self.settings.preconditioned else {}

    def given(self, step_size: float) -> float:
        """√(ε T): on the density p^(1/T), whose gradient is 1/T times as large, that is the step ε at temperature T."""
        return math.sqrt(step_size * self.settings.temperature)

    def reported(self, leapfrog: float) -> float:
        """ε."""
        return leapfrog**2 / (1.0 if self.settings.step_size is None else self.settings.temperature)

    def batch_noise(self, variance: Tensor, leapfrog: float) -> Tensor:
        """ε V / 4, of the noise ε."""
        return leapfrog**2 * variance / 4

    def step_for_noise(self, variance: float, share: float) -> float:
        """The step at which that is ``share``."""
        return math.sqrt(4 * share / max(variance, 1e-300))

    def learned(self, state: SGLDState) -> Tensor | None:
        """The inverse mass at the end of a window."""
        return super().learned(state) if state.squares is None else _rms_mass(state.squares, self.damping)

    def dynamics(
        self, state: SGLDState, factor: float = 1.0, *, noise: float = 1.0, leapfrog: float | None = None
    ) -> Run:
        """Steps of ε times ``factor``."""
        epsilon = factor * (leapfrog or self.leapfrog(state)) ** 2
        if self.settings.preconditioned:
            return _following(epsilon, self.memory, self.damping)
        spread = (epsilon * self.injected(state, math.sqrt(epsilon))).sqrt() * noise  # (D,), in units of Σ
        if self.kind == "identity":
            own = spread if state.noise_count else math.sqrt(epsilon) * noise
            return repeated(plain_step, (0.5 * epsilon, own), ("position", "gradient"))
        shared = (0.5 * epsilon, _STEEPEST * math.sqrt(epsilon), Metric(state.inverse_mass).factor, spread)
        return repeated(whitened_step, shared, ("position", "gradient"))


def decreasing(step: int, decay: float) -> float:
    """The factor of the step size after ``step`` steps."""
    return (1 + step / _DELAY) ** -decay


def decreasing_steps(sampler: SGLD, state: SGLDState) -> list[Stage]:
    """As many steps as cover the time of a transition."""
    factor = decreasing(state.taken, sampler.decay)
    return [(round(sampler.steps / factor), factor, 1.0)]


# --- the steps themselves --------------------------------------------------------------------------------------------


def plain_step(
    value_and_grad: Gradient, position: Tensor, gradient: Tensor, raw: Tensor, half: Tensor, spread: Tensor
) -> tuple[Tensor, ...]:
    """θ + ε/2 g + spread ξ."""
    position = torch.addcmul(torch.addcmul(position, gradient, half), noise_from(raw), spread)
    value, gradient = value_and_grad(position)
    return position, gradient, value


def whitened_step(
    value_and_grad: Gradient, position: Tensor, gradient: Tensor, raw: Tensor,
    half: Tensor, steepest: Tensor, factor: Tensor, spread: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """θ + L (ε/2 Lᵀ g + spread ξ), the drift clipped."""
    drift = (pull(gradient, factor) * half).clamp(-steepest, steepest)
    position = position + move_by(torch.addcmul(drift, noise_from(raw), spread), factor)
    value, gradient = value_and_grad(position)
    return position, gradient, value


def _following(epsilon: float, memory: float, damping: float) -> Run:
    """θ + ε/2 Σ g + √(ε Σ) ξ with Σ from the running squares of the gradients."""

    def run(state: SGLDState, batches: MiniBatches, first: int, count: int) -> SGLDState:
        gradient, value = state.gradient, state.value
        assert state.squares is not None
        position, squares = state.position.clone(), state.squares.clone()
        for step in range(first, first + count):
            squares.lerp_(gradient.square().mean(0), 1 - memory)
            mass = _rms_mass(squares, damping)
            position.addcmul_(gradient, mass, value=0.5 * epsilon)
            noise = noise_from(raw_noise(*position.shape, like=position))
            position.addcmul_(noise, mass.sqrt_(), value=math.sqrt(epsilon))
            value, gradient = batches.gradient(position, step)
        return replace(state, position=position, gradient=gradient, value=value, squares=squares)

    return run


def _rms_mass(squares: Tensor, damping: float) -> Tensor:
    return squares.sqrt().add_(damping).reciprocal_()
