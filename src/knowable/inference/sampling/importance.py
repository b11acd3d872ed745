r"""Importance sampling: draws from somewhere else, weighted by how much more the posterior likes them.

.. math:: w_s = \frac{p(D \mid \theta_s)\, p(\theta_s)}{q(\theta_s)}, \quad \theta_s \sim q, \qquad
    E[h(\theta) \mid D] \approx \frac{\sum_s w_s h(\theta_s)}{\sum_s w_s}, \qquad p(D) \approx \frac1S \sum_s w_s
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.posterior import Samples
from knowable.core.chains.target import DensityTarget, ModelTarget, NormalDensity, Target
from knowable.core.compiling.engine import Engine
from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params, expand_params, stack_params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number, check_type, parse_memory
from knowable.core.support.progress import ProgressSetting, progress_bar
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.errors import ConvergenceWarning, Interrupted, InvalidArgument, Unsupported
from knowable.inference.sampling.importance_weights import (
    effective_sample_size,
    effective_sample_sizes,
    largest_safe_k,
    smooth_weights,
    systematic_resample,
)
from knowable.inference.sampling.initial_positions import (
    Start,
    check_density,
    first_positions,
    full_precision,
    starting_points,
)
from knowable.inference.sampling.mode import StudentTProposal, laplace_proposal, refitted

_PROPOSALS = ("laplace", "prior")
_ENOUGH = 100  # effective sample size below which a run warns
_BLOCK = 64  # draws weighed together, fewer where a draw is large
_BLOCK_BYTES = 2**26
_VECTORISE_BELOW = 20_000  # parameters; beyond it a batched call is no faster than a loop


@dataclass(frozen=True, repr=False, kw_only=True)
class ImportanceSampling(Method):
    r"""Independent draws from a proposal, weighted; the evidence comes with them.

    .. math:: w_s = p(D, \theta_s) / q(\theta_s), \qquad \log p(D) \approx \log \frac1S \sum_s w_s

    The weights are Pareto-smoothed (Vehtari et al., 2024), and the shape k of their tail says whether they can be
    trusted: beyond 0.7 a few draws are all that counts. So it is, nearly always, for draws from the prior once there
    are many data or many weights: none of them comes near the posterior. Then sample by chains (``NUTS``), or give a
    proposal that knows where the posterior is. What no diagnostic can show is a mode that the proposal never visits.

    Args:
        draws: Number of weighted draws.
        proposal: ``"laplace"``: a Student t at the mode, as wide as the inverse Hessian there and refitted to its own
            weighted draws. ``"prior"``. Or a fitted posterior with a density, such as that of ``MeanFieldVI``.
        smooth: Whether the weights are Pareto-smoothed.
        df: Degrees of freedom of the Student t; few are heavy tails, which keep weights bounded.
        rounds: How often, at most, the Student t is refitted (up to 100 parameters; beyond, draws are too few to tell).
        max_parameters: Refuse ``"laplace"`` for more: the Hessian is a D by D matrix.
        max_memory: The most that kept draws may take, in bytes or as text (``"1GB"``); where it does not suffice, they
            are resampled to fewer.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.5))
        >>> kn.ImportanceSampling().fit(model, (x, 2 * x)).log_evidence.kind
        'estimate'
    """

    family = "sampling"
    summary = "weighted draws from the prior or an approximation, with a warning where the weights are unreliable"
    aliases = ("importance", "psis")
    references = ("vehtari2024",)
    supports_row_weights = True

    draws: int = 4000
    proposal: str | Posterior = "laplace"
    smooth: bool = True
    df: float = 5.0
    rounds: int = 5
    max_parameters: int = 2_000
    max_memory: int | str = "1GB"

    def __post_init__(self) -> None:
        check_count("draws", self.draws)
        check_type("smooth", self.smooth, bool, "True or False")
        check_number("df", self.df, above=0)
        check_count("rounds", self.rounds, at_least=0)
        check_count("max_parameters", self.max_parameters)
        parse_memory(self.max_memory)
        if not isinstance(self.proposal, Posterior):
            check_choice("proposal", self.proposal, _PROPOSALS)
        elif type(self.proposal).log_prob is Posterior.log_prob:
            raise InvalidArgument(
                f"proposal must be a posterior with a density, such as that of MeanFieldVI; a "
                f"{type(self.proposal).__name__} has none."
            )

    def _fit(self, job: FitJob) -> Particles:
        """Draw and weigh."""
        started, model, seed, progress = time.monotonic(), job.model, job.seed, job.progress
        rows, engine = job.rows, full_precision(self, job.engine)
        self._check_size(sum(model.params()[name].numel() for name in model.random_names))
        with own_randomness(derive_seed(seed, "importance")):
            start = starting_points(job, "network" if isinstance(self.proposal, str) else self.proposal, 1)
            target = ModelTarget(model, rows, points=start.points, buffers=start.buffers, mode=engine.mode)
            density = JointDensity(model, rows, start)
            proposal = self._proposal(model, target, density, start, seed)
            run = weighted_draws(proposal, density, self.draws, smooth=self.smooth, seed=seed, progress=progress)
            index, log_weights = self._kept(run, target.layout.size * start.positions.element_size(), seed)
            position = drawn_again(proposal, run, index, seed).to(model.dtype)
            stack = {name: value.contiguous() for name, value in target.layout.views(position).items()}
        proper = all(prior is None or prior.proper for prior in map(model.prior.prior_of, model.random_names))
        return Particles(
            model, stack, log_weights, points=start.points, buffers=start.buffers, seed=seed,
            log_evidence=LogEvidence(run.log_evidence, "estimate", run.error) if proper else None,
            diagnostics=self._diagnostics(run, time.monotonic() - started),
        )  # fmt: skip

    def sample(
        self,
        log_density: Callable[[Params], Tensor],
        init_params: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        progress: ProgressSetting = None,
        engine: Engine | None = None,
    ) -> Samples:
        """Draw from a bare density, by a Student t around the mode that is found from ``init_params``.

        Args:
            log_density: Log density of one dict of parameters, up to a constant, as a scalar tensor that autograd can
                differentiate. Parameters that are confined (a scale) are the caller's to transform.
            init_params: Start values for the search of the mode, or a list of several.
            seed: Fixes everything random.
            progress: Show a bar (None: only on a terminal).
            engine: How the gradient is computed.

        Returns:
            Draws of equal weight, resampled by their weights, as one chain; a draw of large weight follows itself.
            ``diagnostics.ess`` is the effective sample size for the mean of each parameter, ``diagnostics["ess"]`` that
            of all, ``diagnostics["pareto_k"]`` the shape of the weights' tail; ``diagnostics["log_evidence"]``
            estimates the log of the density's integral.
        """
        started = time.monotonic()
        seed, engine = check_count("seed", seed, at_least=0), full_precision(self, engine)
        if self.proposal != "laplace":
            raise InvalidArgument("proposal must be 'laplace' for a bare density, which has no prior and no model.")
        several = isinstance(init_params, Sequence) and not isinstance(init_params, str)
        layout, first = first_positions(init_params, max(1, len(init_params)) if several else 1)
        self._check_size(layout.size)
        target = DensityTarget(log_density, layout, mode=engine.mode)
        check_density(target, first)
        density = BareDensity(log_density, layout, first.dtype)
        with own_randomness(derive_seed(seed, "importance")):
            proposal = self._student_t(target, density, first, seed)
            run = weighted_draws(proposal, density, self.draws, smooth=self.smooth, seed=seed, progress=progress)
        index = systematic_resample(run.log_weights, len(run.log_weights), generator_for(seed, "resample"))
        position = drawn_again(proposal, run, None, seed)
        draws = layout.views(position[index].to(first.dtype).unsqueeze(0))
        figures = ChainDiagnostics.of(draws, self._diagnostics(run, time.monotonic() - started))
        sizes = {k: v.clone() for k, v in layout.views(effective_sample_sizes(position, run.log_weights)).items()}
        return Samples(draws, run.values[index].unsqueeze(0), replace(figures, ess=sizes))

    # --- the proposal ------------------------------------------------------------------------------------------------

    def _proposal(self, model: Model, target: ModelTarget, density: JointDensity, start: Start, seed: int) -> Proposal:
        if isinstance(self.proposal, Posterior):
            return FittedProposal(self.proposal, target.layout)
        if self.proposal == "prior":
            return PriorProposal(model, target.layout)
        return self._student_t(target, density, start.positions, seed)

    def _student_t(
        self, target: Target, density: JointDensity | BareDensity, start: Tensor, seed: int
    ) -> StudentTProposal:
        proposal = laplace_proposal(target, start, df=self.df)
        generator = generator_for(seed, "rounds", device=start.device)
        return refitted(proposal, density, rounds=self.rounds, generator=generator)

    def _check_size(self, size: int) -> None:
        if self.proposal == "laplace" and size > self.max_parameters:
            raise Unsupported(
                f"ImportanceSampling(proposal='laplace') would need a {size:,} x {size:,} Hessian; max_parameters is "
                f"{self.max_parameters:,}. Give a fitted posterior as proposal, make fewer parameters random, or "
                f"sample by chains (HMC)."
            )

    # --- the result --------------------------------------------------------------------------------------------------

    def _kept(self, run: WeightedDraws, bytes_each: int, seed: int) -> tuple[Tensor | None, Tensor]:
        """All draws (None) with their weights, or as many as there is memory for, resampled."""
        room = max(1, (parse_memory(self.max_memory) or 0) // bytes_each)
        if room >= len(run.log_weights):
            return None, run.log_weights
        index = systematic_resample(run.log_weights, room, generator_for(seed, "resample"))
        index, counts = index.unique(return_counts=True)
        return index, counts.double().log()

    def _diagnostics(self, run: WeightedDraws, seconds: float) -> Diagnostics:
        count, ess = len(run.log_weights), run.ess
        terms = {
            "draws": float(count), "ess": ess, "pareto_k": run.k, "log_evidence": run.log_evidence,
            "log_evidence_error": run.error,
        }  # fmt: skip
        terms = {name: value for name, value in terms.items() if not math.isnan(value)}
        message = f"{count} draws from {_named(self.proposal)} have an effective sample size of {ess:.0f}"
        converged = None
        if run.interrupted:
            converged = False
            warnings.warn(f"Stopped from the keyboard: {message}.", Interrupted, stacklevel=4)
        elif not math.isnan(run.k):
            converged = run.k <= largest_safe_k(count) and ess >= min(_ENOUGH, count / 10)
            if not converged:
                warnings.warn(_advice(self.proposal, message, run.k, count), ConvergenceWarning, stacklevel=4)
        return Diagnostics(
            method=repr(self), terms=terms, converged=converged, interrupted=run.interrupted, message=message,
            seconds=seconds,
        )  # fmt: skip


def _named(proposal: str | Posterior) -> str:
    if isinstance(proposal, Posterior):
        return f"a {type(proposal).__name__}"
    return "the prior" if proposal == "prior" else "a Student t at the mode"


def _advice(proposal: str | Posterior, message: str, k: float, count: int) -> str:
    safe = largest_safe_k(count)
    what = (
        "The proposal is too unlike the posterior: give another one"
        if proposal != "prior"
        else "Draws from the prior do not find the posterior: give proposal='laplace' or a fitted posterior"
    )
    more = "more draws help little" if k > safe else "or ask for more draws"
    return (
        f"{message} (Pareto k {k:.2f}, to be trusted up to {safe:.2f}). {what}, or sample by chains (NUTS, HMC); "
        f"{more}. The weighted averages and the evidence rest on a few draws."
    )


# --- drawing block by block, and the weights -------------------------------------------------------------------------


class PriorProposal:
    """Draws from the prior, which cancels in the weights: None stands for its density."""

    def __init__(self, model: Model, layout: Layout):
        self.model, self.layout, self.device = model, layout, model.device
        start = model.params()
        self.like = {name: start[name] for name in layout.names}

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, None]:
        """Positions ``(count, D)``."""
        draws = [self.model.prior.sample(self.like, generator=generator) for _ in range(count)]
        return self.layout.flatten(stack_params(draws)), None


class FittedProposal:
    """Draws from a fitted posterior of the same parameters."""

    def __init__(self, posterior: Posterior, layout: Layout):
        self.posterior, self.layout, self.device = posterior, layout, posterior.model.device
        given = [name for name in posterior.model.random_names if name not in posterior.points]
        if set(given) != set(layout.names):
            odd = sorted(set(given) ^ set(layout.names))
            raise InvalidArgument(
                f"proposal must be a posterior over the same random parameters as the model; they differ in "
                f"{', '.join(odd[:5])}."
            )

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Positions ``(count, D)`` and their log densities."""
        params = self.posterior.sample(count, generator)
        return self.layout.flatten(params), self.posterior.log_prob(params).double()


Proposal = PriorProposal | FittedProposal | StudentTProposal


class JointDensity:
    """The log joint of a model given its point estimates, the likelihood and the prior apart; draws ``(n, D)``."""

    def __init__(self, model: Model, data: Data, start: Start):
        self.model, self.start = model, start
        self._target = ModelTarget(model, data, points=start.points, buffers=start.buffers)
        self.layout = self._target.layout
        self.block = _block_size(self.layout.size)
        self._vectorise = sum(value.numel() for value in model.params().values()) <= _VECTORISE_BELOW
        normal = NormalDensity.of(model, self.layout)
        self._normal = None if normal is None else NormalDensity(normal.mean.double(), normal.precision.double())

    def __call__(self, position: Tensor) -> Tensor:
        """Log joint of each draw."""
        return self.log_likelihood(position) + self.log_prior(position)

    def log_likelihood(self, position: Tensor) -> Tensor:
        """Σ log p(y | x, θ) of each draw."""
        return torch.cat([self._of_block(block.to(self.model.dtype)) for block in position.split(self.block)])

    def log_prior(self, position: Tensor) -> Tensor:
        """Log p(θ) of the random parameters of each draw."""
        if self._normal is not None:
            return self._normal.value(position.double())
        layout, prior = self.layout, self.model.prior
        position = position.to(self.model.dtype)
        try:
            return vmap(lambda flat: prior.log_prob(layout.views(flat)))(position).double()
        except RuntimeError:
            return torch.stack([prior.log_prob(layout.views(flat)) for flat in position]).double()

    def _of_block(self, block: Tensor) -> Tensor:
        stack = {**expand_params(self.start.points, len(block)), **self.layout.views(block)}
        network = self.model.network_params(stack)
        total = torch.zeros(len(block), dtype=torch.float64, device=block.device)
        for x, y, *weights in self._target.rows(self.block):
            outputs = self.model.network.over_draws(network, x, buffers=self.start.buffers, vectorise=self._vectorise)
            total += self.model.scores(outputs, y, stack, *weights).sum(-1).double()
        return total


class BareDensity:
    """A bare log density of draws ``(n, D)``."""

    def __init__(self, log_density: Callable[[Params], Tensor], layout: Layout, dtype: torch.dtype):
        self.dtype, self.layout = dtype, layout
        self.block = _block_size(layout.size)
        self._target = DensityTarget(log_density, layout, mode="eager")  # too few calls for a recording to pay

    def __call__(self, position: Tensor) -> Tensor:
        """Log density of each draw."""
        return torch.cat([self._target.value(block.to(self.dtype)).double() for block in position.split(self.block)])


def _block_size(dimension: int) -> int:
    return max(1, min(_BLOCK, _BLOCK_BYTES // (8 * dimension)))


@dataclass(frozen=True)
class WeightedDraws:
    """Weights of all draws, ``(n,)`` in double precision."""

    log_weights: Tensor
    values: Tensor  # log density of the target
    k: float
    interrupted: bool
    block: int  # draws of one random stream

    @property
    def ess(self) -> float:
        """Effective sample size."""
        return effective_sample_size(self.log_weights)

    @property
    def log_evidence(self) -> float:
        """Log of the mean weight."""
        return (self.log_weights.logsumexp(0) - math.log(len(self.log_weights))).item()

    @property
    def error(self) -> float:
        """Standard error of the log of the mean weight, by the delta method."""
        count = len(self.log_weights)
        if count < 2:
            return math.nan
        return math.sqrt(max(0.0, (count / self.ess - 1) / (count - 1)))


def weighted_draws(
    proposal: Proposal, density: JointDensity | BareDensity, draws: int, *, smooth: bool, seed: int,
    progress: ProgressSetting,
) -> WeightedDraws:  # fmt: skip
    """Draw block by block and weigh; the draws themselves are made again once it is known which ones are kept."""
    found: list[tuple[Tensor, Tensor]] = []
    interrupted = False
    with progress_bar("ImportanceSampling", progress) as bar:
        try:
            for number, count in enumerate(_blocks(draws, density.block)):
                found.append(_weights(density, *_draw(proposal, number, count, seed)))
                bar.update(min(draws, (number + 1) * density.block), draws, "weighing draws")
        except KeyboardInterrupt:
            interrupted = True
    if not found:
        raise KeyboardInterrupt  # there are no draws yet to return
    raw = torch.cat([weights for _, weights in found]).nan_to_num(-math.inf, math.inf, -math.inf)
    if not torch.isfinite(raw.max()):
        raise InvalidArgument(
            "No draw has a finite weight: the likelihood of all of them is zero, not a number or infinite. Give a "
            "proposal nearer to the posterior, or check the data's scale."
        )
    smoothed, k = smooth_weights(raw)
    values = torch.cat([value for value, _ in found])
    return WeightedDraws(smoothed if smooth else raw, values, k, interrupted, density.block)


def _weights(density: JointDensity | BareDensity, position: Tensor, log_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log density of the target and log weight of each draw."""
    if log_q is not None:
        value = density(position)
        return value, value - log_q
    assert isinstance(density, JointDensity)
    likelihood = density.log_likelihood(position)
    return likelihood, likelihood


def _blocks(draws: int, size: int) -> list[int]:
    return [min(size, draws - first) for first in range(0, draws, size)]


def _draw(proposal: Proposal, number: int, count: int, seed: int) -> tuple[Tensor, Tensor | None]:
    """Block ``number``, on its own stream: the same draws whenever it is asked for."""
    with torch.no_grad():
        return proposal.draw(count, generator_for(seed, "draws", number, device=proposal.device))


def drawn_again(proposal: Proposal, run: WeightedDraws, index: Tensor | None, seed: int) -> Tensor:
    """The draws named by ``index``, in order (None: all), ``(n, D)``."""
    found, first = [], 0
    for number, count in enumerate(_blocks(len(run.log_weights), run.block)):
        here = slice(None) if index is None else index[(index >= first) & (index < first + count)] - first
        if index is None or len(here):  # type: ignore[arg-type]
            found.append(_draw(proposal, number, count, seed)[0][here])
        first += count
    return torch.cat(found)
