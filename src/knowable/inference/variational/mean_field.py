"""Mean-field Gaussian variational inference (Graves, 2011; Blundell et al., 2015; Kingma et al., 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.engine import Engine
from knowable.core.method import Method, admit, identity_of
from knowable.core.model import Model
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.point_estimate import PointObjective, fit_point, training_diagnostics
from knowable.core.posterior import Posterior
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.start_values import means_for
from knowable.core.training import Training, TrainingResult, train
from knowable.core.types import Params
from knowable.errors import InvalidArgument, InvalidType
from knowable.inference.variational.mean_field_objective import BY_SCORE, ESTIMATORS, MeanFieldObjective
from knowable.inference.variational.target_notes import learned_scale_notes, tempering_notes, warmup_notes

_DRAWS = {"score": 16, "local_score": 8}  # where they are not given, and not 1
_KL_DRAWS = 64  # estimates of the KL averaged in the final bound; they differ only where it has no closed form
_BOUND_ROWS = 200_000  # forward passes of single rows spent on the final estimate of the bound


@dataclass(frozen=True, repr=False)
class MeanFieldVI(Method, Training):
    r"""An independent normal distribution for every weight, fitted by maximising the evidence lower bound.

    .. math:: \mathrm{ELBO} = E_q[\log p(D \mid \theta)] - \mathrm{KL}(q \,\|\, p)

    There is no weight of the KL to set: everything is on the full-data scale and ``beta=1`` is Bayes. Prediction always
    uses weight draws shared by all inputs, whatever the estimator that training used.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        estimator: How the gradient is estimated.
            ``"auto"``: local reparameterisation for linear layers whose weights act once per example, weight draws
            elsewhere: exact and quick.
            ``"local"``: local reparameterisation for every linear layer and convolution (independent noise at each
            position: an approximation).
            ``"weight"``: one draw of all weights per step (Bayes by backprop).
            ``"flipout"``: as ``"weight"``, with pseudo-independent perturbations for each example.
            ``"score"``: log-derivative with a leave-one-out baseline; needs no gradient of the likelihood, and many
            more draws.
            ``"local_score"``: the same, Rao-Blackwellised by layer: the outputs of linear layers are drawn for each
            example, and their scores multiplied by that example's likelihood alone.
        draws: Weight draws per step; None is 1, 16 for ``"score"`` and 8 for ``"local_score"``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which the KL's factor rises to its full value. It changes the path and not the target.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (a MAP fit is; scales of the
            prior that are to be learned wait at their first values meanwhile), or a fitted posterior.
        initial_scale: Standard deviation all weights start with: small, so that training begins as that of a point.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior. (``beta`` raises the likelihood alone to the power 1/beta.)

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MeanFieldVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.predict(x).mean.shape
        torch.Size([40, 1])
    """

    estimator: str = "auto"
    draws: int | None = None
    beta: float = 1.0
    kl_warmup: int = 0
    start: str | Posterior = "network"
    initial_scale: float = 0.02
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("estimator", self.estimator, ESTIMATORS)
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.estimator in BY_SCORE and self.draws == 1:
            raise InvalidArgument(
                f"draws must be >= 2 with estimator={self.estimator!r}: each draw is compared with the others."
            )
        check_number("beta", self.beta, above=0)
        check_number("temperature", self.temperature, above=0)
        if self.beta != 1.0 and self.temperature != 1.0:
            raise InvalidArgument(
                f"beta and temperature cannot both differ from 1, got {self.beta:g} and {self.temperature:g}: they "
                f"temper different things (the likelihood; the whole posterior). Choose one."
            )
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
        return DiagonalNormal(
            model, loc, scale, points=points, buffers=objective.net_buffers, seed=seed, log_evidence=bound,
            diagnostics=training_diagnostics(
                self, model, result, {**loc, **points}, terms, self._notes(model, rows.size, result)
            ),
        )  # fmt: skip

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MeanFieldObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        draws = self.draws or _DRAWS.get(self.estimator, 1)
        return MeanFieldObjective(
            model, x, size, estimator=self.estimator, draws=draws, beta=self.beta, temperature=self.temperature,
            kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, start=start,
        )  # fmt: skip

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

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        return (
            *tempering_notes(self.beta, self.temperature),
            *warmup_notes(self.kl_warmup, result),
            *learned_scale_notes(model, size),
        )


def _final_bound(objective: MeanFieldObjective, data: Data, seed: int) -> tuple[LogEvidence | None, dict[str, float]]:
    """The bound at the end, with its standard error: full passes over the data with fresh weight draws."""
    draws = int(min(256, max(4, _BOUND_ROWS // data.size)))
    with torch.no_grad(), own_randomness(derive_seed(seed, "bound")):
        kl, kl_error = _mean_and_error([objective.divergence().item() for _ in range(_KL_DRAWS)])
        fit, fit_error = _mean_and_error([_full_log_likelihood(objective, data) for _ in range(draws)])
    terms = {"expected_log_likelihood": fit, "kl": kl, "elbo": fit - kl}
    priors = [objective.model.prior.prior_of(name) for name in objective.layout.names]
    if any(prior is not None and not prior.proper for prior in priors):
        return None, terms  # the constant of an improper prior is arbitrary: there is no evidence to bound
    return LogEvidence(fit - kl, "bound", math.hypot(fit_error, kl_error)), terms


def _full_log_likelihood(objective: MeanFieldObjective, data: Data) -> float:
    """Log p(D | θ) of all rows for one draw of the weights."""
    model, q = objective.model, objective.q
    weights = torch.addcmul(q[0], q[1].exp(), torch.randn_like(q[0]))
    params = {**objective.point_params(), **objective.layout.views(weights)}
    return sum(
        model.score(model.forward(params, x, buffers=objective.net_buffers), y, params).sum().item() for x, y in data
    )


def _mean_and_error(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
