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

from torch import Tensor

from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.posterior import Samples
from knowable.core.chains.target import DensityTarget, ModelTarget, Target
from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.predicting import parse_memory
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.errors import ConvergenceWarning, Interrupted, InvalidArgument, InvalidType, Unsupported
from knowable.inference.sampling.mode import StudentTProposal, laplace_proposal, refitted
from knowable.inference.sampling.pareto import largest_safe_k
from knowable.inference.sampling.sampler import Start, check_density, first_positions, starting_points
from knowable.inference.sampling.weighing import (
    BareDensity,
    FittedProposal,
    JointDensity,
    PriorProposal,
    Proposal,
    Weighed,
    drawn_again,
    effective_sizes,
    systematic,
    weigh,
)

_PROPOSALS = ("laplace", "prior")
_ENOUGH = 100  # effective draws, below which a run says so


@dataclass(frozen=True, repr=False)
class ImportanceSampling(Method):
    r"""Independent draws from a proposal, weighted; the evidence comes with them.

    .. math:: w_s = p(D, \theta_s) / q(\theta_s), \qquad \log p(D) \approx \log \frac1S \sum_s w_s

    The weights are Pareto-smoothed (Vehtari et al., 2024), and the shape k of their tail says whether they can be
    trusted: beyond 0.7 a few draws are all that counts. So it is, nearly always, for draws from the prior once there
    are many data or many weights: none of them comes near the posterior. Then sample by chains (``NUTS``), or give a
    proposal that knows where the posterior is. What no diagnostic can show is a mode that the proposal never visits.

    Args:
        draws: How many.
        proposal: ``"laplace"``: a Student t at the mode, as wide as the inverse Hessian there and refitted to its own
            weighted draws. ``"prior"``. Or a fitted posterior with a density, such as that of ``MeanFieldVI``.
        smooth: Pareto-smooth the weights.
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
    summary = "weighted draws from the prior or an approximation, with a warning where the weights are worthless"
    aliases = ("importance", "psis")
    references = ("vehtari2024",)

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
        rows, engine = job.rows, _full_precision(job.engine)
        self._check_size(sum(model.params()[name].numel() for name in model.random_names))
        with own_randomness(derive_seed(seed, "importance")):
            start = starting_points(job, "network" if isinstance(self.proposal, str) else self.proposal, 1)
            target = ModelTarget(model, rows, points=start.points, buffers=start.buffers, mode=engine.mode)
            density = JointDensity(model, rows, start)
            proposal = self._proposal(model, target, density, start, seed)
            run = weigh(proposal, density, self.draws, smooth=self.smooth, seed=seed, progress=progress)
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
        progress: bool | None = None,
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
            ``diagnostics.ess`` is what they are worth for the mean of each parameter, ``diagnostics["ess"]`` for all
            and ``diagnostics["pareto_k"]`` the shape of the weights' tail; ``diagnostics["log_evidence"]`` estimates
            the log of the density's integral.
        """
        started = time.monotonic()
        seed, engine = check_count("seed", seed, at_least=0), _full_precision(engine)
        if not callable(log_density):
            raise InvalidType(f"log_density must be a function of a dict of tensors, got {type(log_density).__name__}.")
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
            run = weigh(proposal, density, self.draws, smooth=self.smooth, seed=seed, progress=progress)
        index = systematic(run.log_weights, len(run.log_weights), generator_for(seed, "resample"))
        position = drawn_again(proposal, run, None, seed)
        draws = layout.views(position[index].to(first.dtype).unsqueeze(0))
        figures = ChainDiagnostics.of(draws, self._diagnostics(run, time.monotonic() - started))
        worth = {k: v.clone() for k, v in layout.views(effective_sizes(position, run.log_weights)).items()}
        return Samples(draws, run.values[index].unsqueeze(0), replace(figures, ess=worth))

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

    def _kept(self, run: Weighed, bytes_each: int, seed: int) -> tuple[Tensor | None, Tensor]:
        """All draws (None) with their weights, or as many as there is memory for, resampled."""
        room = max(1, (parse_memory(self.max_memory) or 0) // bytes_each)
        if room >= len(run.log_weights):
            return None, run.log_weights
        index = systematic(run.log_weights, room, generator_for(seed, "resample"))
        index, counts = index.unique(return_counts=True)
        return index, counts.double().log()

    def _diagnostics(self, run: Weighed, seconds: float) -> Diagnostics:
        count, worth = len(run.log_weights), run.worth
        terms = {
            "draws": float(count), "ess": worth, "pareto_k": run.k, "log_evidence": run.log_evidence,
            "log_evidence_error": run.error,
        }  # fmt: skip
        terms = {name: value for name, value in terms.items() if not math.isnan(value)}
        message = f"{count} draws from {_named(self.proposal)} are worth {worth:.0f}"
        converged = None
        if run.interrupted:
            converged = False
            warnings.warn(f"Stopped from the keyboard: {message}.", Interrupted, stacklevel=4)
        elif not math.isnan(run.k):
            converged = run.k <= largest_safe_k(count) and worth >= min(_ENOUGH, count / 10)
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


def _full_precision(engine: Engine | None) -> Engine:
    engine = as_engine(engine)
    if engine.precision != "full":
        raise Unsupported(
            f"ImportanceSampling needs exact densities: precision={engine.precision!r} would change the weights."
        )
    return engine
