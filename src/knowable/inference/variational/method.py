"""What variational methods have in common: their settings, the fit, and the final ELBO."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Batch, Data
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import NOT_BAYES, LogEvidence
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import LITTLE_WORK, Trained, TrainingResult
from knowable.errors import ConvergenceWarning, Interrupted, InvalidArgument, InvalidType, Unsupported
from knowable.inference.point.point import PointObjective, fit_point, means_for, training_diagnostics
from knowable.inference.variational.newton import Rise, is_steady, possible_rise, refine, worth_checking
from knowable.inference.variational.objective import VariationalObjective

_WARMUP_STEPS = 2_000  # with kl_warmup=None
_FAR = 100.0  # residuals over the noise, beyond which the noise begins at their size


@dataclass(frozen=True, repr=False, kw_only=True)
class VariationalMethod(Trained, Method):
    r"""A distribution q over the weights, fitted by maximising the evidence lower bound (ELBO).

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p)
        = \log p(D) - \mathrm{KL}(q \,\|\, p(\theta \mid D))
    """

    supports_row_weights = True
    says_rise: ClassVar[bool] = False  # whether the fit ends with a check of how far the ELBO could still rise

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
                f"kl_warmup must be at most half of epochs={self.epochs}, got {self.kl_warmup}: too few epochs would "
                f"be trained at the full weight of the KL."
            )
        if not isinstance(self.start, Posterior):
            if not isinstance(self.start, str):
                raise InvalidType(f"start must be 'network', 'map' or a posterior, got {type(self.start).__name__}.")
            check_choice("start", self.start, ("network", "map"))

    # --- what a method defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> VariationalObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""

    def target(self, model: Model) -> Model:
        """The model whose ELBO is maximised: the user's own, unless the method replaces priors."""
        return model

    def elbo_settings(self, start: Params | None) -> dict[str, Any]:
        """The arguments that the objectives of all methods share."""
        shared = ("beta", "temperature", "kl_warmup", "initial_scale")
        return {name: getattr(self, name) for name in shared if hasattr(self, name)} | {"start": start}

    def _objective_for(self, model: Model, rows: Data, seed: int, start: Params | None) -> Any:
        return self.objective(model, rows.first[0], rows.size, start=start)

    def _identity(self, objective: Any) -> dict[str, Any]:
        """What a resumed fit must agree in, beside method, model and data."""
        return {}

    def _evidence(
        self, objective: Any, rows: Data, seed: int, epochs: float
    ) -> tuple[LogEvidence | None, dict[str, float]]:
        """The log evidence and the terms that the report has, after so many epochs of training."""
        return final_elbo(objective, rows, seed, epochs)

    def _posterior(self, objective: Any, **common: Any) -> Posterior:
        return objective.posterior(**common)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (
            *tempering_notes(self.beta, getattr(self, "temperature", 1.0)),
            *warmup_notes(self.kl_warmup or 0, result),
            *learned_scale_notes(model, size),
        )

    def _fit(self, job: FitJob) -> Posterior:
        with own_randomness(derive_seed(job.seed, "start")):  # a loader may draw
            method, model = self._with_warmup(job.rows), with_noise_of_residuals(job.model, *job.rows.first[:2])
        return method._maximise_elbo(replace(job, method=method, model=model))

    def _maximise_elbo(self, job: FitJob) -> Posterior:
        model, rows, seed = job.model, job.rows, job.seed
        with own_randomness(derive_seed(seed, "start")), share_of_time(0.3):
            objective = self._objective_for(self.target(model), rows, seed, start_values(self, job))
        with share_of_time(0.9):  # the rest is for the final ELBO
            options = {**job.options, "identity": {**job.identity, **self._identity(objective)}}
            result = train(objective, rows, self.training_settings(), **options)
        result, rise = self._settle([objective], rows, seed, result)
        evidence, terms = self._evidence(objective, rows, seed, result.epochs)
        terms = {**terms, **rise}
        posterior = self._posterior(objective, seed=seed, log_evidence=evidence)
        notes = (*self._notes(model, rows.size, result), *rows.sample_notes)
        posterior.diagnostics = training_diagnostics(self, model, result, posterior.mean(), terms, notes)
        return posterior

    def _settle(
        self, objectives: Sequence[VariationalObjective], rows: Data, seed: int, result: TrainingResult
    ) -> tuple[TrainingResult, dict[str, float]]:
        """How far the ELBO could still rise; with ``epochs=None``, after Newton steps where they raise it.

        Args:
            objectives: Those that were trained together; where there are several, point estimates stay as they are.
            rows: The data.
            seed: The fit's.
            result: How training went.

        Returns:
            How the run went in this light, and terms for the diagnostics. Networks that differ between training
            and evaluation (dropout, batch statistics) are left alone: their ELBO is that of training.
        """
        if not self.says_rise or result.interrupted or _kept_epoch(result) < objectives[0].settles_from:
            return result, {}
        finished = self.epochs is None and not result.out_of_time
        changing = objectives if finished else []
        kept = [[value.detach().clone() for value in each.tensors().values()] for each in changing]
        try:
            if not worth_checking(objectives[0], rows, result.epochs):
                return _unchecked(result, "so short a training is not worth its cost"), {}
            if not is_steady(objectives[0], rows):
                return _unchecked(result, "the network computes something else in training than in evaluation"), {}
            rises = []
            for number, each in enumerate(objectives):
                own = derive_seed(seed, "component", number) if number else seed
                if finished and rows.held is not None:
                    refine(each, rows.held, own, hold_points=len(objectives) > 1)
                rises.append(possible_rise(each, rows, own, result.epochs))
        except Unsupported as error:  # such as a likelihood of values only, with the score-function estimator
            return _unchecked(result, str(error).rstrip(".")), {}
        except KeyboardInterrupt:
            with torch.no_grad():
                for each, values in zip(changing, kept, strict=True):
                    for value, old in zip(each.tensors().values(), values, strict=True):
                        value.copy_(old)
            text = "The fit was stopped after training, before it was known how far the ELBO could still rise."
            warnings.warn(text, Interrupted, stacklevel=2)
            return replace(result, interrupted=True, message=f"{result.message}, then stopped from the keyboard"), {}
        rise = Rise.mean(rises)
        if rise.is_small:
            return result, rise.terms
        said = f"the ELBO could still rise by about {rise.nats:.3g} nats (± {rise.standard_error:.2g})"
        result = replace(result, converged=False, message=f"{result.message.replace('settled', 'ended')}: {said}")
        if finished:
            text = f"The fit has not converged: {said}. Standardise the data, or pass epochs= to train longer."
            warnings.warn(text, ConvergenceWarning, stacklevel=2)
        return result, rise.terms

    def _with_warmup(self, rows: Data) -> Self:
        """This method with a number of epochs for the KL warm-up."""
        if self.kl_warmup is not None:
            return self
        batches = rows.batches_per_epoch(self.training_settings().rows_per_step(rows.size))
        per_epoch = -(-batches // self.training.accumulate)
        wanted = -(-_WARMUP_STEPS // per_epoch)
        return replace(self, kl_warmup=wanted if self.epochs is None else min(wanted, self.epochs // 3))


def _unchecked(result: TrainingResult, why: str) -> TrainingResult:
    """The result with a word that it is not known how far the ELBO could still rise."""
    return replace(result, message=f"{result.message}; how far the ELBO could still rise was not checked: {why}")


def with_noise_of_residuals(model: Model, x: Tensor, y: Tensor) -> Model:
    """The model with its learned noise begun at the size of the residuals, where that is a hundred times larger.

    Adam would take tens of thousands of steps to get there: its memory of the first gradients is long.
    """
    name, params = f"{LIKELIHOOD_PREFIX}{model.likelihood.noise_name}", model.params()
    if name not in params:
        return model
    with torch.no_grad():
        output = model.forward(params, x, buffers=model.buffers())
        y = model.align(y, output)
        squares, counted = (y - output).square(), model.likelihood.counted(y)
        size = (squares if counted is None else squares[counted]).mean().sqrt()
    if not math.isfinite(size) or size <= _FAR * params[name].exp().min():
        return model
    return model.starting_at({name: torch.full_like(params[name], math.log(size))})


def start_values(method: VariationalMethod, job: FitJob) -> Params | None:
    """The first means that ``method.start`` asks for; None for the network's own weights."""
    model = job.model
    if isinstance(method.start, Posterior):
        return means_for("start", model, method.start)
    if method.start == "network":
        return None
    objective = PointObjective(model, job.rows.size, use_prior=True, held=model.hyper_names)
    settings = method.training_settings(training=replace(method.training, on_divergence="halve"))
    best = fit_point(replace(job, checkpoint=None), settings, objective=objective)
    if best.diagnostics.interrupted:
        raise KeyboardInterrupt  # there is no distribution yet to return
    return best.mean()


def check_normals(initial_scale: float, beta: float = 1.0, temperature: float = 1.0) -> None:
    """Check the settings of methods whose q has scales, and of those with a temperature."""
    check_number("initial_scale", initial_scale, above=0)
    check_number("temperature", temperature, above=0)
    if beta != 1.0 and temperature != 1.0:
        raise InvalidArgument(
            f"beta and temperature cannot both differ from 1, got {beta:g} and {temperature:g}: they temper different "
            f"things (the likelihood; the whole posterior). Choose one."
        )


# --- notes in the report ---------------------------------------------------------------------------------------------

_MANY_SCALES = 10  # learned from one data set; or a tenth of its rows


def tempering_notes(beta: float, temperature: float) -> tuple[str, ...]:
    """A note for each factor other than 1 on the KL or on the entropy."""
    notes = []
    if beta != 1.0:
        notes.append(f"beta={beta:g}: {NOT_BAYES} (beta=1 is). Every row counts {1 / beta:.3g} times.")
    if temperature != 1.0:
        notes.append(f"temperature={temperature:g}: {NOT_BAYES} (temperature=1 is).")
    return tuple(notes)


def warmup_notes(kl_warmup: int, result: TrainingResult) -> tuple[str, ...]:
    """A note if the state that was kept is from the KL warm-up: interrupted, or stopped early by validation data."""
    epoch = _kept_epoch(result)
    if epoch >= kl_warmup:
        return ()
    share = (epoch + 1.0) / (kl_warmup + 1.0)
    return (
        f"kl_warmup={kl_warmup}: the state that was kept is from epoch {epoch:g}, at a KL weight of {share:.0%}, so "
        f"{NOT_BAYES}. Train on, or shorten the warm-up.",
    )


def _kept_epoch(result: TrainingResult) -> float:
    scored = [record for record in result.history if "validation_log_likelihood" in record]
    if scored:
        return max(scored, key=lambda record: record["validation_log_likelihood"])["epoch"]
    if result.interrupted:  # the state at the end of the last record
        return result.history[-1]["epoch"] if result.history else 0.0
    return result.epochs


def learned_scale_notes(model: Model, size: int) -> tuple[str, ...]:
    """A note if the prior has many learned scales for the number of rows."""
    start = model.params()
    count = sum(start[name].numel() for name in model.hyper_names)
    if count < max(2, min(_MANY_SCALES, size / 10)):
        return ()
    return (
        f"{count:,} scales of the prior were learned from the same {size:,} rows: the ELBO is maximised over them, "
        f"which may overfit. Share scales (per='glob', per='layer') or give a hyperprior.",
    )


# --- the ELBO at the end of a fit, with its standard error -----------------------------------------------------------

_KL_DRAWS = 64  # estimates of a KL without a closed form
_ELBO_ROWS = 200_000  # rows in all passes of the final estimate of the likelihood
_MOST_PASSES, _FEWEST_PASSES = 256, 4  # over the data; where fewer are affordable, parts of the rows have to do
_PASSES_PER_EPOCH = 0.3  # of evaluation that cost a tenth of an epoch of training
_LEAST_ROWS = 2_048  # in all passes, however short the training was


def final_elbo(
    objective: VariationalObjective, data: Data, seed: int, epochs: float = math.inf
) -> tuple[LogEvidence | None, dict[str, float]]:
    """The ELBO at β = 1 and T = 1, and its terms, with new weight draws for each estimate of the likelihood.

    Args:
        objective: The objective.
        data: All rows.
        seed: Fixes the draws.
        epochs: Of training, a tenth of whose cost the estimate may have.

    Returns:
        The ELBO (None under an improper prior, whose constant is arbitrary), and the terms
        ``expected_log_likelihood``, ``kl`` and ``elbo``.
    """
    with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
        kl, kl_error = mean_and_error(_kl_estimates(objective))
        fit, fit_error = mean_and_error(
            estimates_of_all_rows(
                lambda batches: _log_likelihood(objective, batches), data, seed, epochs, objective.dimension
            )
        )
    terms = {"expected_log_likelihood": fit, "kl": kl, "elbo": fit - kl}
    priors = [objective.model.prior.prior_of(name) for name in objective.model.random_names]
    if any(prior is not None and not prior.proper for prior in priors):
        return None, terms
    return LogEvidence(fit - kl, "bound", math.hypot(fit_error, kl_error)), terms


def _kl_estimates(objective: VariationalObjective) -> list[float]:
    """Estimates of the KL; two are enough where it has a closed form."""
    found = [objective.kl_divergence().item() for _ in range(2)]
    count = 0 if found[0] == found[1] else _KL_DRAWS - 2
    return [*found, *(objective.kl_divergence().item() for _ in range(count))]


def _log_likelihood(objective: VariationalObjective, batches: Iterable[Batch]) -> float:
    """Log p(D | θ) of the rows in ``batches`` for one draw of the weights."""
    model = objective.model
    params = {**objective.point_params(), **objective.draw_weights(1)[0]}
    return sum(
        model.score(model.forward(params, x, buffers=objective.net_buffers), y, params, *weights).sum().item()
        for x, y, *weights in batches
    )


def estimates_of_all_rows(
    total: Callable[[Iterable[Batch]], Any], data: Data, seed: int, epochs: float, dimension: int
) -> list[Any]:
    """Independent estimates of a sum over all rows, at the cost of a tenth of ``epochs`` of training or little more.

    Args:
        total: The sum over the rows of some batches, at new random draws: a number or a tensor.
        data: All rows; of a loader those kept of it, it is not read again.
        seed: Fixes which rows are taken where not all can be.
        epochs: Of training. After few of them, each estimate is from another part of the rows.
        dimension: Number of trained parameters. With many of them, short training is followed by few estimates.
    """
    least = min(_LEAST_ROWS, LITTLE_WORK // max(1, dimension))
    affordable = max(_PASSES_PER_EPOCH * epochs, least / data.size)
    passes = min(_MOST_PASSES, max(_FEWEST_PASSES, _ELBO_ROWS // data.size), affordable)
    held = data.held if passes >= _FEWEST_PASSES else None
    if held is not None:
        return [total(held) for _ in range(int(passes))]
    fewest = 16 if least == _LEAST_ROWS else _FEWEST_PASSES
    return [scale * total([batch]) for scale, batch in data.parts(passes, seed=seed, fewest=fewest)]


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
