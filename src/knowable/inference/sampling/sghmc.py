"""Stochastic-gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin, 2014)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.chains.fused_step import Gradient
from knowable.core.support.checks import check_number
from knowable.core.support.randomness import noise_from
from knowable.inference.sampling.metric import Metric, pull, spread
from knowable.inference.sampling.sampler import Sampler
from knowable.inference.sampling.stochastic_gradient import (
    LangevinKernel,
    LangevinState,
    Run,
    check_settings,
    mass_for,
    repeated,
)

_STEEPEST = 10.0  # change of a tuned step's momentum, in standard deviations of the momentum


@dataclass(frozen=True, repr=False, kw_only=True)
class SGHMC(Sampler):
    r"""Gradient steps with momentum, friction, and noise that makes up for the friction.

    .. math:: d\theta = \Sigma p\, dt, \qquad
        dp = \nabla \log p(D, \theta)\, dt - \gamma p\, dt + \sqrt{2 \gamma T}\, \Sigma^{-1/2} dW

    A step of size h moves by half, lets friction and noise act exactly, moves by half, and takes the gradient there
    (the BAOAB splitting of Leimkuhler and Matthews, 2013, seen from its gradient). With :math:`c = e^{-\gamma h}`:

    .. math:: \theta \mathrel{+}= \tfrac h2 \Sigma p, \quad p \leftarrow c\, p + \sqrt{(1 - c^2) T}\, \Sigma^{-1/2} \xi,
        \quad \theta \mathrel{+}= \tfrac h2 \Sigma p, \quad p \mathrel{+}= h \nabla \log p(D, \theta)

    In the notation of the paper the learning rate is h² and the momentum decay 1 - c. For large networks ξ has the
    first five moments of a normal and is quicker to draw. Steps are not tested, which is a bias that is known for a
    normal posterior of variance s² along a direction (and Σ = I): its draws have variance

    .. math:: s^2 \Big(1 + \frac{h^2 V\, (1 + c)}{(1 - c)(4 - h^2 / s^2)}\Big)

    where V is the variance of the gradient's noise, zero unless it comes from mini-batches. So with exact gradients a
    normal posterior has the right variance at any stable step :math:`h < 2 s`; others are off in proportion to h². By
    default the warm-up finds Σ, an estimate of the posterior covariance, and the step: at most 0.5, and less where a
    Metropolis test would refuse more than one step in fifty. What batches bring is measured
    (``diagnostics.terms["batch_noise"]``), kept to a fifth of the noise and taken off the noise injected.

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
        step_size: h, or None to tune it in the warm-up.
        steps: Steps of a transition; its last position is the draw.
        batch_size: Rows of a step, or None for all rows up to 1,024 and 128 beyond.
        mass: Σ: ``"dense"``, ``"diagonal"`` or ``"identity"``; ``"auto"`` is dense up to 100 dimensions and diagonal
            beyond, and the identity where ``step_size`` is given.
        friction: γ, over a unit of time. Where Σ is the posterior covariance 2 brings the swiftest return to the mean;
            with batches more friction allows larger steps.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.SGHMC(chains=8, draws=200).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(2)})
        >>> samples.draws["x"].shape
        torch.Size([8, 200, 2])
    """

    family = "sampling"
    summary = "the same with momentum and friction"
    references = ("chen2014",)

    step_size: float | None = None
    steps: int = 10
    batch_size: int | None = None
    mass: str = "auto"
    friction: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self)
        check_number("friction", self.friction, above=0)

    def kernel(self, dimension: int) -> SGHMCKernel:
        """The transition."""
        return SGHMCKernel(self, mass_for(self, dimension))


@dataclass(frozen=True, kw_only=True)
class SGHMCState(LangevinState):
    """Also the momenta, in coordinates of unit standard deviation."""

    momentum: Tensor


@dataclass
class SGHMCKernel(LangevinKernel):
    """Steps of underdamped Langevin dynamics, one gradient each."""

    settings: SGHMC
    largest: ClassVar[float] = 0.5
    state_type = SGHMCState

    def own_state(self, position: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Momenta of zero."""
        return {"momentum": torch.zeros_like(position)}

    def given(self, step_size: float) -> float:
        """The step h √T: on the density p^(1/T), whose gradient is 1/T times as large, that is h at temperature T."""
        return step_size * math.sqrt(self.settings.temperature)

    def reported(self, leapfrog: float) -> float:
        """The step h."""
        return leapfrog / (1.0 if self.settings.step_size is None else math.sqrt(self.settings.temperature))

    def kept(self, leapfrog: float) -> float:
        """The part c of the momentum that friction leaves."""
        return math.exp(-self.settings.friction * self.reported(leapfrog))

    def batch_noise(self, variance: Tensor, leapfrog: float) -> Tensor:
        """By how much batches raise the variance of draws, where the step is small beside the posterior's width."""
        kept = self.kept(leapfrog)
        return variance * leapfrog**2 * (1 + kept) / (4 * (1 - kept))

    def step_for_noise(self, variance: float, share: float) -> float:
        """The step at which that is at most ``share``: (1 + c) / (1 - c) is at most 1 + 2 / γh."""
        reach = 1 / self.settings.friction
        return 4 * share / max(variance, 1e-300) / (reach + math.sqrt(reach**2 + 4 * share / max(variance, 1e-300)))

    def dynamics(
        self, state: SGHMCState, factor: float = 1.0, *, noise: float = 1.0, leapfrog: float | None = None
    ) -> Run:
        """Steps of h times √factor."""
        leapfrog = math.sqrt(factor) * (leapfrog or self.leapfrog(state))
        kept = self.kept(leapfrog)
        fresh = math.sqrt(1 - kept**2) * noise
        carried = ("position", "momentum", "gradient")
        if self.kind == "identity" and not state.noise_count:
            return repeated(plain_step, (leapfrog, kept, fresh), carried)
        injected = fresh * self.injected(state, leapfrog).sqrt()  # (D,)
        return repeated(whitened_step, (leapfrog, kept, Metric(state.inverse_mass).factor, injected), carried)


# --- the steps themselves --------------------------------------------------------------------------------------------


def plain_step(
    value_and_grad: Gradient, position: Tensor, momentum: Tensor, _: Tensor, raw: Tensor,
    leapfrog: Tensor, kept: Tensor, fresh: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Half of the way, friction and noise, half of the way, and the pull of the gradient there."""
    half = 0.5 * leapfrog
    position = torch.addcmul(position, momentum, half)
    momentum = torch.addcmul(momentum * kept, noise_from(raw), fresh)
    position = torch.addcmul(position, momentum, half)
    value, gradient = value_and_grad(position)
    return position, torch.addcmul(momentum, gradient, leapfrog), gradient, value


def whitened_step(
    value_and_grad: Gradient, position: Tensor, momentum: Tensor, _: Tensor, raw: Tensor,
    leapfrog: Tensor, kept: Tensor, factor: Tensor, fresh: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The same with momenta Lᵀ p; their change is clipped."""
    before, momentum = momentum, torch.addcmul(momentum * kept, noise_from(raw), fresh)
    position = position + spread((before + momentum) * (0.5 * leapfrog), factor)
    value, gradient = value_and_grad(position)
    return position, momentum + (pull(gradient, factor) * leapfrog).clamp(-_STEEPEST, _STEEPEST), gradient, value
