"""What variational methods have in common: their knobs, and the fit itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import NOT_BAYES, LogEvidence
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import Trained, TrainingResult
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.point.point import PointObjective, fit_point, training_diagnostics
from knowable.inference.start import means_for
from knowable.inference.variational.objective import VariationalObjective

_WARMUP_STEPS = 2_000  # where the warm-up is not given


@dataclass(frozen=True, repr=False)
class VariationalFit(Trained, Method):
    r"""A distribution q over the weights, fitted by maximising how well it explains the data less a divergence.

    Args:
        beta: Factor on the divergence: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target. None:
            about 2,000 steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (a MAP fit is; scales of the
            prior that are to be learned wait at their first values meanwhile), or a fitted posterior.
    """

    beta: float = 1.0
    kl_warmup: int | None = 0
    start: str | Posterior = "network"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0)
        if self.kl_warmup is not None:
            check_count("kl_warmup", self.kl_warmup, at_least=0)
        if self.epochs is not None and 2 * (self.kl_warmup or 0) > self.epochs:
            raise InvalidArgument(
                f"kl_warmup must be at most half of epochs={self.epochs}, got {self.kl_warmup}: the fit would end "
                f"before it has seen the Bayes posterior for long."
            )
        if not isinstance(self.start, Posterior):
            if not isinstance(self.start, str):
                raise InvalidType(f"start must be 'network', 'map' or a posterior, got {type(self.start).__name__}.")
            check_choice("start", self.start, ("network", "map"))

    # --- what a method defines ---------------------------------------------------------------------------------------

    def target(self, model: Model) -> Model:
        """The model whose bound is maximised: the user's own, unless the method brings priors with it."""
        return model

    @abstractmethod
    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> VariationalObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""

    def _objective_for(self, model: Model, rows: Data, seed: int, start: Params | None) -> VariationalObjective:
        return self.objective(model, next(iter(rows))[0], rows.size, start=start)

    def _identity(self, objective: Any) -> dict[str, Any]:
        """What a resumed fit must agree in, beside method, model and data."""
        return {}

    def _evidence(self, objective: Any, rows: Data, seed: int) -> tuple[LogEvidence | None, dict[str, float]]:
        """What the fit says of the evidence, and the terms it reports."""
        return None, {}

    def _posterior(self, objective: Any, **common: Any) -> Posterior:
        return objective.posterior(**common)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*warmup_notes(self.kl_warmup or 0, result), *learned_scale_notes(model, size))

    # --- the fit -----------------------------------------------------------------------------------------------------

    def _fit(self, job: FitJob) -> Posterior:
        """Maximise the objective."""
        model, rows, seed = job.model, job.rows, job.seed
        if self.kl_warmup is None:
            chosen = replace(self, kl_warmup=self._chosen_warmup(rows))
            return chosen._fit(replace(job, method=chosen))
        with own_randomness(derive_seed(seed, "start")), share_of_time(0.3):
            target = self.target(model)
            objective = self._objective_for(target, rows, seed, self._start(job))
        with share_of_time(0.9):  # the rest is for the bound
            options = {**job.options, "identity": {**job.identity, **self._identity(objective)}}
            result = train(objective, rows, self.training_settings(), **options)
        evidence, terms = self._evidence(objective, rows, seed)
        posterior = self._posterior(objective, seed=seed, log_evidence=evidence)
        posterior.diagnostics = training_diagnostics(
            self, model, result, posterior.mean(), terms, self._notes(model, rows.size, result)
        )
        return posterior

    def _chosen_warmup(self, rows: Data) -> int:
        """Epochs that make so many steps."""
        batches = rows.batches_per_epoch(self.training_settings().rows_per_step(rows.size))
        per_epoch = -(-batches // self.training.accumulate)
        wanted = -(-_WARMUP_STEPS // per_epoch)
        return wanted if self.epochs is None else min(wanted, self.epochs // 3)

    def _start(self, job: FitJob) -> Params | None:
        model = job.model
        if isinstance(self.start, Posterior):
            return means_for("start", model, self.start)
        if self.start == "network":
            return None
        objective = PointObjective(model, job.rows.size, use_prior=True, held=model.hyper_names)
        settings = self.training_settings(training=replace(self.training, on_divergence="halve"))
        best = fit_point(replace(job, checkpoint=None), settings, objective=objective)
        if best.diagnostics.interrupted:
            raise KeyboardInterrupt  # there is no distribution yet to return
        return best.mean()


@dataclass(frozen=True, repr=False)
class VariationalMethod(VariationalFit):
    """A distribution over the weights with scales of its own.

    Args:
        initial_scale: Standard deviation all weights start with: small, so that training begins as that of a point.
    """

    initial_scale: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("initial_scale", self.initial_scale, above=0)


@dataclass(frozen=True, repr=False)
class BoundMethod(VariationalMethod):
    r"""A distribution q over the weights, fitted by maximising the evidence lower bound.

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p)
        = \log p(D) - \mathrm{KL}(q \,\|\, p(\theta \mid D))

    Args:
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior. (``beta`` raises the likelihood alone to the power 1/beta.)
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, above=0)
        if self.beta != 1.0 and self.temperature != 1.0:
            raise InvalidArgument(
                f"beta and temperature cannot both differ from 1, got {self.beta:g} and {self.temperature:g}: they "
                f"temper different things (the likelihood; the whole posterior). Choose one."
            )

    def _evidence(self, objective: Any, rows: Data, seed: int) -> tuple[LogEvidence | None, dict[str, float]]:
        return final_bound(objective, rows, seed)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (*tempering_notes(self.beta, self.temperature), *super()._notes(model, size, result))


# What a report says where a fit did not aim at the Bayes posterior, or leans on more than the prior it was
# given ---------------------------------------------------------------------------------------------------------------

_MANY_SCALES = 10  # learned from one data set; or a tenth of its rows


def tempering_notes(beta: float, temperature: float) -> tuple[str, ...]:
    """What the factors on the KL and on the entropy do to the target."""
    notes = []
    if beta != 1.0:
        notes.append(f"beta={beta:g}: {NOT_BAYES} (beta=1 is). Every row counts {1 / beta:.3g} times.")
    if temperature != 1.0:
        notes.append(f"temperature={temperature:g}: {NOT_BAYES} (temperature=1 is).")
    return tuple(notes)


def warmup_notes(kl_warmup: int, result: TrainingResult) -> tuple[str, ...]:
    """Whether the state that was kept is from the warm-up of the KL: stopped by hand, or by the validation data."""
    epoch = _epoch_of_what_was_kept(result)
    if epoch >= kl_warmup:
        return ()
    share = (epoch + 1.0) / (kl_warmup + 1.0)
    return (
        f"kl_warmup={kl_warmup}: what was kept is from epoch {epoch:g}, when the KL still counted {share:.0%}, so "
        f"{NOT_BAYES}. Train on, or shorten the warm-up.",
    )


def _epoch_of_what_was_kept(result: TrainingResult) -> float:
    scored = [record for record in result.history if "validation_log_likelihood" in record]
    if scored:
        return max(scored, key=lambda record: record["validation_log_likelihood"])["epoch"]
    if result.interrupted:  # back at the end of the last record
        return result.history[-1]["epoch"] if result.history else 0.0
    return result.epochs


def learned_scale_notes(model: Model, size: int) -> tuple[str, ...]:
    """Whether the prior has more learned scales than the data can be asked to choose."""
    start = model.params()
    count = sum(start[name].numel() for name in model.hyper_names)
    if count < max(2, min(_MANY_SCALES, size / 10)):
        return ()
    return (
        f"{count:,} scales of the prior were learned from the same {size:,} rows: the bound takes the best of them for "
        f"granted, and so may overfit. Share scales (per='glob', per='layer') or give a hyperprior.",
    )


# --- The evidence lower bound at the end of a fit, with its standard error -------------------------------------------

_KL_DRAWS = 64  # estimates of the KL that are averaged; they differ only where it has no closed form
_BOUND_ROWS = 200_000  # forward passes of single rows spent on the likelihood


def final_bound(
    objective: VariationalObjective, data: Data, seed: int
) -> tuple[LogEvidence | None, dict[str, float]]:  # fmt: skip
    """The bound, and its terms: full passes over the data with fresh weight draws.

    Args:
        objective: Holds the distribution. Whatever factor it has on the KL, this is the bound of the model as stated.
        data: All rows.
        seed: Of the fit.

    Returns:
        The bound (None under an improper prior, whose constant is arbitrary), and ``expected_log_likelihood``, ``kl``
        and ``elbo``.
    """
    with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
        kl, kl_error = mean_and_error(_divergences(objective))
        fit, fit_error = mean_and_error([_full_log_likelihood(objective, data) for _ in range(passes_over(data.size))])
    terms = {"expected_log_likelihood": fit, "kl": kl, "elbo": fit - kl}
    priors = [objective.model.prior.prior_of(name) for name in objective.model.random_names]
    if any(prior is not None and not prior.proper for prior in priors):
        return None, terms
    return LogEvidence(fit - kl, "bound", math.hypot(fit_error, kl_error)), terms


def _divergences(objective: VariationalObjective) -> list[float]:
    """Estimates of the KL; two are enough where it is in closed form."""
    found = [objective.divergence().item() for _ in range(2)]
    return found if found[0] == found[1] else [*found, *(objective.divergence().item() for _ in range(_KL_DRAWS - 2))]


def _full_log_likelihood(objective: VariationalObjective, data: Data) -> float:
    """Log p(D | θ) of all rows for one draw of the weights."""
    model = objective.model
    params = {**objective.point_params(), **objective.draw_weights(1)[0]}
    return sum(
        model.score(model.forward(params, x, buffers=objective.net_buffers), y, params).sum().item() for x, y in data
    )


def passes_over(size: int) -> int:
    """How many passes over ``size`` rows a final estimate is worth."""
    return int(min(256, max(4, _BOUND_ROWS // size)))


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
