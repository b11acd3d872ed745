r"""Annealed importance sampling: from the prior to the posterior in many small steps, and the evidence on the way.

.. math:: p_k(\theta) \propto p(\theta)\, p(D \mid \theta)^{\beta_k}, \quad 0 = \beta_0 < \dots < \beta_K = 1, \qquad
    \log w = \sum_{k=1}^K (\beta_k - \beta_{k-1}) \log p(D \mid \theta_{k-1}), \quad E[w] = p(D)
"""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.chains.target import ModelTarget, Target
from knowable.core.compiling.recorder import BatchedGradient
from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.particles import Particles, systematic_indices
from knowable.core.support.checks import check_count
from knowable.core.support.progress import Bar, progress_bar
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.errors import ConvergenceWarning, Unsupported
from knowable.inference.sampling.importance_weights import effective_sample_size
from knowable.inference.sampling.initial_positions import full_precision, starting_points
from knowable.inference.sampling.tempered_moves import Moves, MoveState, check_moves, covariance_factor, moves_of

_OVERLAP = 0.9  # effective share of the draws from one step of the first run to the next
_VARIANCE = 0.5  # of the log weights that the number of steps is chosen for
_MOST = 2000  # steps of the first run
_TUNING = 8  # transitions at each of its steps
_MIXING = 20  # transitions of the draws with which the way back begins
_LEAST_EFFECTIVE = 0.05  # effective sample size, as a share of the draws


@dataclass(frozen=True, repr=False, kw_only=True)
class AnnealedImportance(Method):
    r"""Draws that are annealed from the prior to the posterior; their weights estimate the evidence (Neal, 2001).

    .. math:: p(D) \approx \frac1S \sum_s w_s, \qquad
        \log w_s = \sum_{k=1}^K (\beta_k - \beta_{k-1}) \log p(D \mid \theta_{s,k-1})

    with transitions that leave :math:`p(\theta)\, p(D \mid \theta)^{\beta_k}` as it is. The estimate of p(D) has no
    bias, however badly the transitions mix; its logarithm is too small by about half the variance of the log weights
    over S. A first run, whose draws are thrown away, chooses the steps and tunes the transitions.

    The way back is the check (Grosse, Ghahramani and Adams, 2015): from draws of the posterior to the prior the same
    weights estimate 1 / p(D), so that too few steps or transitions show as a gap, from below on the way there and from
    above on the way back. ``diagnostics`` has both, and a gap of more than four standard errors is warned of. The way
    back begins at draws that the way there has found: a mode that no draw has reached is missed by both.

    Args:
        draws: Number of draws S; the standard error falls with its root.
        temperatures: Number of steps K. None: as many as give the log weights a variance of about a half.
        moves: ``"hmc"`` or ``"metropolis"``, which needs no gradients.
        mass: Covariance that moves use at each step: ``"dense"``, ``"diagonal"``, or ``"auto"`` (dense up to 200
            dimensions).
        steps: Mean number of leapfrog steps, or number of random-walk steps, of a transition; None chooses.
        target_acceptance: Acceptance that steps are tuned to; None is 0.95, or 0.234 for random walks.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.5))
        >>> kn.AnnealedImportance(draws=50).fit(model, (x, 2 * x)).log_evidence.kind
        'estimate'
    """

    family = "sampling"
    summary = "draws annealed from the prior to the posterior: the evidence of small networks, checked from both sides"
    aliases = ("ais",)
    references = ("neal2001", "grosse2015")
    supports_row_weights = True

    draws: int = 200
    temperatures: int | None = None
    moves: str = "hmc"
    mass: str = "auto"
    steps: int | None = None
    target_acceptance: float | None = None

    def __post_init__(self) -> None:
        check_count("draws", self.draws, at_least=2)
        if self.temperatures is not None:
            check_count("temperatures", self.temperatures)
        check_moves(self)

    def _fit(self, job: FitJob) -> Particles:
        """There and back."""
        started, model, seed = time.monotonic(), job.model, job.seed
        engine = full_precision(self, job.engine)
        with own_randomness(derive_seed(seed, "annealed")), progress_bar("AnnealedImportance", job.progress) as bar:
            start = starting_points(job, "prior", self.draws)
            joint = ModelTarget(model, job.rows, points=start.points, buffers=start.buffers, mode=engine.mode)
            run = _Run(self, AnnealedTarget(joint), seed, bar)
            ladder = run.ladder(start.positions)
            there = run.there(_prior_draws(joint, self.draws, seed), ladder)
            back = run.back(there, ladder)
        stack = {name: value.contiguous() for name, value in joint.layout.views(there.position).items()}
        return Particles(
            model, stack, there.log_weights, points=start.points, buffers=start.buffers, seed=seed,
            log_evidence=LogEvidence(there.log_mean, "estimate", there.error),
            diagnostics=self._diagnostics(there, back, len(ladder), time.monotonic() - started),
        )  # fmt: skip

    def _diagnostics(self, there: Weighted, back: Weighted, steps: int, seconds: float) -> Diagnostics:
        gap, error = -back.log_mean - there.log_mean, math.hypot(there.error, back.error)
        terms = {
            "log_evidence": there.log_mean, "log_evidence_error": there.error, "log_evidence_back": -back.log_mean,
            "log_evidence_back_error": back.error, "ess": there.ess, "temperatures": float(steps),
            "acceptance": there.acceptance,
        }  # fmt: skip
        enough = there.ess >= max(2.0, _LEAST_EFFECTIVE * self.draws)
        agree = abs(gap) <= 4 * error
        message = (
            f"log evidence {there.log_mean:.2f} ± {there.error:.2g} on the way there, {-back.log_mean:.2f} ± "
            f"{back.error:.2g} on the way back"
        )
        if not (agree and enough):
            why = "The two do not agree" if enough else f"The effective sample size is {there.ess:.1f}"
            warnings.warn(
                f"{message}. {why}: more temperatures than {steps} (AnnealedImportance(temperatures=...)) or more "
                f"draws are needed.",
                ConvergenceWarning,
                stacklevel=4,
            )
        return Diagnostics(repr(self), terms, converged=agree and enough, message=message, seconds=seconds)


class AnnealedTarget(Target):
    """log p(θ) + β log p(D | θ), for a β that is set."""

    def __init__(self, joint: ModelTarget):
        super().__init__(joint.layout)
        self.joint, self.function, self.beta = joint, joint.function, 1.0
        model, points = joint.model, joint.points
        self._prior = BatchedGradient(
            lambda flat: model.log_prior({**points, **joint.layout.views(flat)}), mode=joint.function.mode
        )

    def parts(self, position: Tensor) -> Parts:
        """Log joint and log prior, with their gradients."""
        return Parts(*self.joint.value_and_grad(position), *self._prior_part(position))

    def _value_and_grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        return self.parts(position).at(self.beta)

    def _value(self, position: Tensor) -> Tensor:
        below = self._prior_part(position)[0]
        return below + self.beta * (self.joint.value(position) - below)

    def _prior_part(self, position: Tensor) -> tuple[Tensor, Tensor]:
        normal = self.joint.normal_prior
        if normal is None:
            return self._prior.value_and_grad(position)
        return normal.added(position, torch.zeros_like(position[:, 0]), torch.zeros_like(position))


@dataclass(frozen=True)
class Parts:
    """Log joint and log prior at some positions."""

    joint: Tensor  # (N,)
    slope: Tensor  # gradient of the joint, (N, D)
    prior: Tensor  # (N,)
    prior_slope: Tensor  # (N, D)

    @property
    def log_likelihood(self) -> Tensor:
        """In double precision; -inf where it is not a number."""
        return (self.joint.double() - self.prior.double()).nan_to_num(-math.inf, math.inf, -math.inf)

    def at(self, beta: float) -> tuple[Tensor, Tensor]:
        """Log density and gradient at β."""
        return (
            self.prior + beta * (self.joint - self.prior),
            self.prior_slope + beta * (self.slope - self.prior_slope),
        )


@dataclass(frozen=True)
class Rung:
    """One step: β, and the tuned moves there."""

    beta: float
    factor: Tensor
    log_scale: Tensor


@dataclass(frozen=True)
class Weighted:
    """The end of one way: positions and weights of all draws."""

    position: Tensor  # (N, D)
    log_weights: Tensor  # (N,), in double precision
    acceptance: float  # mean of all transitions

    @property
    def log_mean(self) -> float:
        """Logarithm of the mean weight."""
        return (self.log_weights.logsumexp(0) - math.log(len(self.log_weights))).item()

    @property
    def ess(self) -> float:
        """Effective sample size."""
        return effective_sample_size(self.log_weights)

    @property
    def error(self) -> float:
        """Standard error of the log of the mean weight, by the delta method."""
        count = len(self.log_weights)
        return math.sqrt(max(0.0, (count / self.ess - 1) / (count - 1)))


class _Run:
    """The three runs of a fit: the one that chooses the steps, there, and back."""

    def __init__(self, method: AnnealedImportance, target: AnnealedTarget, seed: int, bar: Bar):
        self.method, self.target, self.seed, self.bar = method, target, seed, bar
        self.moves: Moves = moves_of(method, target.layout.size, 1)

    def ladder(self, position: Tensor) -> list[Rung]:
        """Steps and tuned moves, by a first run whose draws are resampled at every step."""
        generator, beta = self._generator("first run"), 0.0
        state, rungs = self._begin(position), list[Rung]()
        while beta < 1.0:
            log_likelihood = self.target.parts(state.position).log_likelihood
            step = _next_step(log_likelihood, 1.0 - beta)
            beta = 1.0 if step >= 1.0 - beta else beta + step
            offset = torch.rand((), generator=generator, device=position.device).item()
            chosen = systematic_indices((step * log_likelihood).softmax(0), len(position), offset).to(position.device)
            position = state.position[chosen]
            factor = covariance_factor(position, state.factor)
            state = self._moved_to(state, position, Rung(beta, factor, state.log_scale))
            state = replace(state, updates=min(state.updates, _TUNING))
            for _ in range(_TUNING):
                state, _ = self._transition(state, generator, tuning=True)
            rungs.append(Rung(beta, factor, state.log_scale))
            self.bar.update(min(0.3, 0.3 * beta**0.2), 1.0, f"choosing the steps, {len(rungs)} so far")
            if len(rungs) > _MOST:
                raise Unsupported(
                    f"AnnealedImportance needs more than {_MOST:,} steps from this prior to the posterior: there are "
                    f"too many weights, or the data say far more than the prior. Use Laplace(), whose log_evidence is "
                    f"an approximation, or ImportanceSampling()."
                )
        return self._refined(rungs)

    def _refined(self, rungs: list[Rung]) -> list[Rung]:
        """The same ladder with as many steps as are wanted."""
        variance = len(rungs) * (1 / _OVERLAP - 1)  # of the log weights, and it falls with the number of steps
        count = self.method.temperatures or math.ceil(len(rungs) * max(1.0, variance / _VARIANCE))
        betas = [0.0, *(rung.beta for rung in rungs)]
        found = []
        for k in range(1, count + 1):
            place = k * len(rungs) / count
            below = min(int(place), len(rungs) - 1)
            beta = betas[below] + (place - below) * (betas[below + 1] - betas[below])
            found.append(replace(rungs[max(0, math.ceil(place) - 1)], beta=1.0 if k == count else beta))
        return found

    def there(self, position: Tensor, ladder: list[Rung]) -> Weighted:
        """From draws of the prior to the posterior."""
        generator, state = self._generator("there"), self._begin(position)
        total, beta, accepted = torch.zeros(len(position), dtype=torch.float64, device=position.device), 0.0, 0.0
        for number, rung in enumerate(ladder):
            total = total + (rung.beta - beta) * self.target.parts(state.position).log_likelihood
            state = self._moved_to(state, state.position, rung)
            state, acceptance = self._transition(state, generator)
            beta, accepted = rung.beta, accepted + acceptance / len(ladder)
            self.bar.update(0.3 + 0.35 * number / len(ladder), 1.0, f"there, at {beta:.3g} of the likelihood")
        return Weighted(state.position, total, accepted)

    def back(self, there: Weighted, ladder: list[Rung]) -> Weighted:
        """From draws of the posterior to the prior, by the same moves in reverse order."""
        generator, count = self._generator("back"), len(there.position)
        offset = torch.rand((), generator=generator, device=there.position.device).item()
        chosen = systematic_indices(there.log_weights.softmax(0), count, offset).to(there.position.device)
        state = self._moved_to(self._begin(there.position), there.position[chosen], ladder[-1])
        for _ in range(_MIXING):
            state, _ = self._transition(state, generator)
        total, accepted = torch.zeros_like(there.log_weights), 0.0
        betas = [0.0, *(rung.beta for rung in ladder)]
        for number in reversed(range(len(ladder))):
            state = self._moved_to(state, state.position, ladder[number])
            state, acceptance = self._transition(state, generator)
            step = betas[number] - betas[number + 1]
            total = total + step * self.target.parts(state.position).log_likelihood
            accepted += acceptance / len(ladder)
            self.bar.update(1 - 0.35 * number / len(ladder), 1.0, f"back, at {betas[number]:.3g} of the likelihood")
        return Weighted(state.position, total, accepted)

    def _generator(self, purpose: str) -> torch.Generator:
        return generator_for(self.seed, purpose, device=self.target.joint.model.device)

    def _begin(self, position: Tensor) -> MoveState:
        return self.moves.init(self.target, position)

    def _moved_to(self, state: MoveState, position: Tensor, rung: Rung) -> MoveState:
        """The state of chains at ``position`` whose target and moves are now those of ``rung``."""
        self.target.beta = rung.beta
        value, gradient = self.target.value_and_grad(position)
        kept = self.moves.kept_gradient(gradient)
        return replace(
            state, position=position, value=value, gradient=kept, factor=rung.factor, log_scale=rung.log_scale
        )

    def _transition(
        self, state: MoveState, generator: torch.Generator, *, tuning: bool = False
    ) -> tuple[MoveState, float]:
        heat = torch.ones_like(state.value)
        state, info = self.moves.transition(self.target, state, heat, generator=generator, tuning=tuning)
        assert info.acceptance is not None
        return state, info.acceptance.mean().item()


def _next_step(log_likelihood: Tensor, most: float) -> float:
    """The largest step of β after which the effective sample size is still the wanted share, by bisection."""
    wanted, low, high = _OVERLAP * len(log_likelihood), 0.0, most
    if effective_sample_size(high * log_likelihood) >= wanted:
        return most
    for _ in range(60):
        middle = 0.5 * (low + high) if low > 0.01 * high else max(0.1 * high, 2 * low)
        if effective_sample_size(middle * log_likelihood) >= wanted:
            low = middle
        else:
            high = middle
    return low if low > 0.0 else high


def _prior_draws(joint: ModelTarget, count: int, seed: int) -> Tensor:
    """Positions ``(count, D)``."""
    model: Model = joint.model
    draws = model.prior_draws(count, generator=generator_for(seed, "there", "prior", device=model.device))
    return joint.layout.flatten({name: draws[name] for name in joint.layout.names})
