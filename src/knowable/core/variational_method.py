"""What variational methods have in common: their knobs, and the fit itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.data import Data
from knowable.core.deadline import share_of_time
from knowable.core.diagnostics import LogEvidence
from knowable.core.engine import Engine
from knowable.core.final_bound import final_bound
from knowable.core.method import Method, admit, identity_of
from knowable.core.model import Model
from knowable.core.point_estimate import PointObjective, fit_point, training_diagnostics
from knowable.core.posterior import Posterior
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.start_values import means_for
from knowable.core.target_notes import learned_scale_notes, tempering_notes, warmup_notes
from knowable.core.training import Training, TrainingResult, train
from knowable.core.types import Params
from knowable.core.variational_objective import VariationalObjective
from knowable.errors import InvalidArgument, InvalidType

_WARMUP_STEPS = 2_000  # where the warm-up is not given


@dataclass(frozen=True, repr=False)
class VariationalFit(Method, Training):
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

    takes_binary: ClassVar[bool] = False
    """Whether it can do parameters that are 0 or 1."""

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

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Posterior:
        """Maximise the objective; see :meth:`knowable.core.method.Method.fit`."""
        rows, held_out, seed = admit(
            model, data, validation, seed, batch_size=self.batch_size, binary=self.takes_binary
        )
        if self.kl_warmup is None:
            return replace(self, kl_warmup=self._chosen_warmup(rows)).fit(
                model, data, validation=validation, seed=seed, progress=progress, checkpoint=checkpoint, engine=engine
            )
        with own_randomness(derive_seed(seed, "start")), share_of_time(0.3):
            target = self.target(model)
            start = self._start(model, rows, held_out, seed, progress, engine)
            objective = self._objective_for(target, rows, seed, start)
        with share_of_time(0.9):  # the rest is for the bound
            result = train(
                objective, rows, self, validation=held_out, seed=seed, progress=progress, checkpoint=checkpoint,
                engine=engine, label=type(self).__name__,
                identity={**identity_of(self, model, rows, held_out), **self._identity(objective)},
            )  # fmt: skip
        evidence, terms = self._evidence(objective, rows, seed)
        posterior = self._posterior(objective, seed=seed, log_evidence=evidence)
        posterior.diagnostics = training_diagnostics(
            self, model, result, posterior.mean(), terms, self._notes(model, rows.size, result)
        )
        return posterior

    def _chosen_warmup(self, rows: Data) -> int:
        """Epochs that make so many steps."""
        per_epoch = -(-rows.batches_per_epoch(self.rows_per_step(rows.size)) // self.accumulate)
        wanted = -(-_WARMUP_STEPS // per_epoch)
        return wanted if self.epochs is None else min(wanted, self.epochs // 3)

    def _start(
        self, model: Model, rows: Data, held_out: Data | None, seed: int, progress: bool | None, engine: Engine | None
    ) -> Params | None:
        if isinstance(self.start, Posterior):
            return means_for("start", model, self.start)
        if self.start == "network":
            return None
        settings = Training(
            self.epochs, self.learning_rate, self.batch_size, self.optimiser, self.clip, self.patience,
            accumulate=self.accumulate,
        )  # fmt: skip
        objective = PointObjective(model, rows.size, use_prior=True, held=model.hyper_names)
        best = fit_point(
            self, model, rows, training=settings, use_prior=True, validation=held_out, seed=seed, progress=progress,
            engine=engine, objective=objective,
        )  # fmt: skip
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
