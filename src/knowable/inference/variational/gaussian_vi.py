"""What methods share that fit an independent normal to every weight: their settings, where they begin, and the fit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.data import Data
from knowable.core.engine import Engine
from knowable.core.method import Method, admit, identity_of
from knowable.core.model import Model
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.point_estimate import fit_point, training_diagnostics
from knowable.core.posterior import Posterior
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.start_values import means_for
from knowable.core.training import Training, train
from knowable.core.types import Params
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.variational.mean_field import _final_bound
from knowable.inference.variational.mean_field_objective import MeanFieldObjective


@dataclass(frozen=True, repr=False)
class GaussianVI(Method, Training):
    """An independent normal for every weight, by maximising a bound in the one training loop.

    Args:
        beta: Factor on the KL. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which the KL's factor rises to its full value.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (a MAP fit is), or a fitted
            posterior.
        initial_scale: Standard deviation all weights start with.
    """

    beta: float = 1.0
    kl_warmup: int = 0
    start: str | Posterior = "network"
    initial_scale: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0)
        check_count("kl_warmup", self.kl_warmup, at_least=0)
        if self.epochs is not None and 2 * self.kl_warmup > self.epochs:
            raise InvalidArgument(
                f"kl_warmup must be at most half of epochs={self.epochs}, got {self.kl_warmup}: the fit would end "
                f"before it has seen the Bayes posterior for long."
            )
        check_number("initial_scale", self.initial_scale, above=0)
        if not isinstance(self.start, Posterior):
            if not isinstance(self.start, str):
                raise InvalidType(f"start must be 'network', 'map' or a posterior, got {type(self.start).__name__}.")
            check_choice("start", self.start, ("network", "map"))

    @abstractmethod
    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MeanFieldObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""

    def fit(
        self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None
    ) -> DiagonalNormal:
        """Maximise the bound; see :meth:`knowable.core.method.Method.fit`."""
        rows, held_out, seed = admit(model, data, validation, seed, batch_size=self.batch_size)
        with own_randomness(derive_seed(seed, "start")):
            first = next(iter(rows))[0]
            start = self._start(model, rows, held_out, seed, progress, engine)
            objective = self.objective(model, first, rows.size, start=start)
        result = train(
            objective, rows, self, validation=held_out, seed=seed, progress=progress, checkpoint=checkpoint,
            engine=engine, label=type(self).__name__, identity=identity_of(self, model, rows, held_out),
        )  # fmt: skip
        loc, scale = objective.loc_and_scale()
        points = objective.point_params()
        bound, terms = _final_bound(objective, rows, seed)
        return self._posterior(
            model, loc, scale, points=points, buffers=objective.net_buffers, seed=seed, log_evidence=bound,
            diagnostics=training_diagnostics(self, model, result, {**loc, **points}, terms, self._notes()),
        )  # fmt: skip

    def _posterior(self, model: Model, loc: Params, scale: Params, **common: Any) -> DiagonalNormal:
        return DiagonalNormal(model, loc, scale, **common)

    def _start(
        self, model: Model, rows: Data, held_out: Data | None, seed: int, progress: bool | None, engine: Engine | None
    ) -> Params | None:
        if isinstance(self.start, Posterior):
            return means_for("start", model, self.start)
        if self.start == "network" or model.hyper_names:
            return None
        settings = Training(self.epochs, self.learning_rate, self.batch_size, self.optimiser, self.clip, self.patience)
        best = fit_point(
            self, model, rows, training=settings, use_prior=True, validation=held_out, seed=seed, progress=progress,
            engine=engine,
        )  # fmt: skip
        if best.diagnostics.interrupted:
            raise KeyboardInterrupt  # there is no distribution yet to return
        return best.mean()

    def _notes(self) -> tuple[str, ...]:
        if self.beta == 1.0:
            return ()
        return (f"beta={self.beta:g}: the target is not the Bayes posterior (beta=1 is).",)
