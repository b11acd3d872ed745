"""Stein variational gradient descent (Liu and Wang, 2016)."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.chains.kernel import Block, Info, Kernel, State, WarmUp
from knowable.core.chains.settings import ChainResult
from knowable.core.chains.target import Target
from knowable.core.support.checks import check_count, check_number
from knowable.errors import ConvergenceWarning, InvalidArgument
from knowable.inference.sampling.initial_positions import searches_modes
from knowable.inference.sampling.mini_batches import MiniBatches, batch_seed
from knowable.inference.sampling.sampler import Sampler

_CHECK, _CHECK_BATCHES = 50, 200  # updates between two checks of the force, more where that is noisy
_SMALL = 0.01  # force, over what pulls and pushes, at which particles count as at rest
_GAIN = 0.95  # what is left of the force after that many updates, if it still falls
_HALVINGS = 6  # of the step before the search ends
_AT_REST = 0.2  # force that may be left then; a larger one says that particles are stuck


@dataclass(frozen=True, repr=False, kw_only=True)
class SVGD(Sampler):
    r"""Particles that climb the density and push each other apart, until they stand like draws from it.

    .. math:: \theta_i \mathrel{+}= \eta\, \frac1n \sum_j \Big[ k(\theta_j, \theta_i) \nabla \log p(D, \theta_j)
        + \nabla_{\theta_j} k(\theta_j, \theta_i) \Big], \qquad k(\theta, \theta') = e^{-\|\theta - \theta'\|^2 / h}

    Distances are measured in units of the particles' own spread in each coordinate, and steps are made in the same
    units, so that the scales of the parameters do not matter. The bandwidth h follows the median distance between
    particles, :math:`h = \mathrm{med}^2 / \log(n + 1)`. Updates go on until the force has settled: pull
    and push cancel to 1%, or it no longer falls although the step was made smaller.

    The result is deterministic given its start and is **not** a set of independent draws: it has ``chains`` particles
    with one draw each, and R-hat and effective sample sizes do not apply. With few particles for its dimension it
    understates variances, badly so (Ba et al., 2022): the sum of the variances over all directions is bounded by the
    number of particles and not by the posterior. Two particles for a standard normal end at distance
    :math:`2\sqrt{\log(3)/2} = 1.48` from each other, in any number of dimensions D; two draws would be about
    :math:`\sqrt{2 D}` apart. For the variances use a sampler with chains; SVGD is for a few good representatives.

    Args:
        chains: Particles.
        draws: Must be 1: one draw for each particle.
        max_gradients: Must be None.
        warmup: Largest number of updates; None is 2,000.
        start: Where the particles of a network begin: ``"ensemble"`` (one trained network each), ``"map"`` (one for
            all), ``"prior"`` (draws from it), ``"network"`` (its own weights), or a fitted posterior to draw from.
        temperature: T of the tempered posterior p(θ | D)^(1/T). Anything but 1 is not the Bayes posterior.
        storage: How particles are kept (:class:`~knowable.ChainStorage`); ``thin`` must be 1.
        bandwidth: h in units of the particles' spread, or None for the median.
        learning_rate: First step η, in units of the particles' spread.
        batch_size: Rows of an update, or None for all rows up to 1,024 and 128 beyond.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> samples = kn.SVGD(chains=20).sample(lambda p: -0.5 * (p["x"] ** 2).sum(), {"x": torch.zeros(1)})
        >>> samples.draws["x"].shape
        torch.Size([20, 1, 1])
    """

    family = "sampling"
    summary = "particles that follow the gradient and repel each other"
    references = ("liu2016",)

    chains: int = 64
    draws: int | None = 1
    bandwidth: float | None = None
    learning_rate: float = 0.1
    batch_size: int | None = None

    default_warmup: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("chains", self.chains, at_least=2)
        if self.draws != 1 or self.storage.thin != 1:
            raise InvalidArgument(
                f"SVGD has one draw for each particle: draws and storage.thin must be 1, got draws={self.draws} and "
                f"thin={self.storage.thin}. Ask for more particles with chains=."
            )
        if self.bandwidth is not None:
            check_number("bandwidth", self.bandwidth, above=0)
        check_number("learning_rate", self.learning_rate, above=0)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)

    def kernel(self, dimension: int) -> SVGDKernel:
        """The update of all particles."""
        return SVGDKernel(self)

    def begins_near_modes(self, dimension: int) -> bool:
        """In few dimensions."""
        return searches_modes(dimension)

    def _run(self, target: Target, start: Tensor, **options: Any) -> ChainResult:
        result = super()._run(target, start, **options)
        if result.interrupted:
            return result
        force, updates = result.terms["force"], result.state.updates
        ended, exact = result.state.settled, len(result.state.forces) == _CHECK
        settled = ended and (force <= _AT_REST or not exact)
        message = f"{'settled' if settled else 'not settled'} after {updates} updates of {self.chains} particles"
        if not settled and (ended or self.warmup is None):  # who asks for a number of updates gets it without remark
            advice = (
                "and no longer less: bring the parameters to one scale, or use a sampler that learns theirs (NUTS)."
                if ended
                else "and less and less. Allow more updates with warmup=."
            )
            warnings.warn(
                f"The particles have {message}: what pulls them and what pushes them differ by {force:.2g} of their "
                f"size, {advice}",
                ConvergenceWarning, stacklevel=4,
            )  # fmt: skip
        return replace(result, converged=settled, message=message)


@dataclass(frozen=True, kw_only=True)
class SVGDState(State):
    """The state of SVGD."""

    batch_seed: int  # seed of all batches
    first: Tensor  # running mean of the forces (Adam), (n, D)
    second: Tensor  # running mean of their squares
    forces: Tensor  # size of the force at each update since the last check, over the sizes of pull and push
    before: float = math.inf  # mean of them at the last check
    rate: float  # the step η
    halvings: int = 0  # how often it was halved
    updates: int = 0  # made so far
    settled: bool = False  # whether updates have ended


@dataclass
class SVGDKernel(Kernel):
    """One update of all particles for each transition, and none once the force has settled."""

    settings: SVGD

    state_type = SVGDState

    def init(self, target: Target, position: Tensor, *, generator: torch.Generator) -> SVGDState:
        """Where the particles begin; coordinates in which all stand in one place are moved apart a little.

        So do networks that were trained to the same mode, up to rounding errors.
        """
        rounding = 1e3 * torch.finfo(position.dtype).eps * position.abs().amax(0)
        together = position.std(0) <= rounding
        if together.any():
            noise = torch.randn(position.shape, generator=generator, dtype=position.dtype, device=position.device)
            position = torch.where(together, position + 1e-2 * noise * position.abs().clamp_min(0.1), position)
        seed = batch_seed(generator)
        batches = MiniBatches(target, self.settings.batch_size, seed)
        return SVGDState(
            position=position, value=batches.gradient(position, 0)[0], batch_seed=seed,
            first=torch.zeros_like(position), second=torch.zeros_like(position),
            rate=float(self.settings.learning_rate),
            forces=torch.zeros(_CHECK if batches.exact else _CHECK_BATCHES, dtype=torch.float64),
        )  # fmt: skip

    def advance(
        self, target: Target, state: SVGDState, n: int, *, generator: torch.Generator, warmup: WarmUp | None = None
    ) -> tuple[SVGDState, Block]:
        """``n`` updates in the warm-up; where it has ended the particles stay."""
        batches, found = MiniBatches(target, self.settings.batch_size, state.batch_seed), []
        for _ in target.in_time(n):
            if warmup is not None and not state.settled:
                state = self._updated(state, batches)
            elif warmup is None and batches.exact:
                state = replace(state, value=target.value(state.position))
            found.append((state, Info()))
        return state, Block.stack(found)

    def tuned(self, state: SVGDState) -> dict[str, float]:
        """How far pull and push are from cancelling, over the last updates, and the updates made."""
        since = state.updates % len(state.forces)
        lately = state.forces[:since] if since else state.forces
        return {"force": lately.mean().item(), "updates": float(state.updates)}

    def _updated(self, state: SVGDState, batches: MiniBatches) -> SVGDState:
        number, position = state.updates + 1, state.position
        value, gradient = batches.gradient(position, state.updates)
        scale = position.std(0).clamp_min(1e-30)  # (D,)
        centred = (position - position.mean(0)) / scale  # far from 0, distances would be rounding errors
        pull, push = stein_forces(centred, gradient * scale, self.settings.bandwidth)
        force = pull + push
        forces = state.forces.clone()
        forces[state.updates % len(forces)] = (force.norm() / (pull.norm() + push.norm()).clamp_min(1e-30)).double()
        first, second = state.first.lerp(force, 0.1), state.second.lerp(force.square(), 0.01)
        # Adam (Kingma and Ba, 2015)
        direction = (first / (1 - 0.9**number)) / ((second / (1 - 0.99**number)).sqrt() + 1e-8)
        state = replace(
            state, position=position + state.rate * scale * direction, value=value, first=first, second=second,
            forces=forces, updates=number,
        )  # fmt: skip
        return _checked(state) if number % len(forces) == 0 else state


def _checked(state: SVGDState) -> SVGDState:
    """Has the force settled? Where it no longer falls the step is halved, a few times, before updates end."""
    force = state.forces.mean().item()
    if force < _SMALL or state.halvings >= _HALVINGS:
        return replace(state, settled=True, before=force)
    if force > _GAIN * state.before:
        return replace(state, rate=0.5 * state.rate, halvings=state.halvings + 1, before=force)
    return replace(state, before=force)


def stein_forces(particles: Tensor, gradient: Tensor, bandwidth: float | None = None) -> tuple[Tensor, Tensor]:
    r"""The direction in which particles ``(n, D)`` approach a density with these gradients the fastest.

    .. math:: \phi(\theta_i) = \frac1n \sum_j \Big[ k_{ji} \nabla \log p(\theta_j)
        + \tfrac2h k_{ji} (\theta_i - \theta_j) \Big]

    Args:
        particles: Positions.
        gradient: Of the log density at each.
        bandwidth: h, or None for the squared median distance over log(n + 1).

    Returns:
        What pulls to the modes, and what pushes apart; the direction is their sum.
    """
    n = len(particles)
    squared = torch.cdist(particles, particles).square()  # (n, n)
    if bandwidth is None:
        apart = squared[~torch.eye(n, dtype=torch.bool, device=squared.device)]
        width = (apart.median() / math.log(n + 1)).clamp_min(1e-30)
    else:
        width = torch.tensor(bandwidth).to(squared)
    kernel = torch.exp(-squared / width)
    push = 2 / width * (kernel.sum(1, keepdim=True) * particles - kernel @ particles)
    return kernel @ gradient / n, push / n
