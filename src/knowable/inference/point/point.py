"""Fitting one point: shared by maximum likelihood, MAP, and every method that starts from a MAP fit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.particles import Particles
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.settings import Trained, TrainingResult, TrainingSettings
from knowable.errors import Unsupported


class PointObjective(Objective):
    r"""-log p(D, θ) / N as a function of one set of parameters (without log p(θ) for maximum likelihood).

    With ``attack`` half of the likelihood is that of adversarial inputs, by the fast gradient sign method
    (Goodfellow et al., 2015):

    .. math:: x' = x - \epsilon\, \mathrm{sign}\, \nabla_x \log p(y \mid x, \theta)

    Args:
        model: The model.
        size: Number of training examples N.
        use_prior: Whether log p(θ) is part of it.
        attack: Size ε of the adversarial perturbation, for each element of a row; None for none.
        held: Names of parameters that are not trained; they stay part of the density.
    """

    recordable = True

    def __init__(
        self, model: Model, size: int, *, use_prior: bool, attack: Tensor | None = None, held: Collection[str] = ()
    ):
        super().__init__(model, size)
        self.use_prior, self.attack = use_prior, attack
        start = model.params()
        self.names = list(start)
        self.values = nn.ParameterList(
            [nn.Parameter(value, requires_grad=name not in held) for name, value in start.items()]
        )

    def params(self) -> Params:
        """The parameters, by name."""
        return dict(zip(self.names, self.values, strict=True))

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        params = self.params()
        log_likelihood = self._log_likelihood(params, x, y, weights)
        terms = {"log_likelihood": log_likelihood.detach() * self.size}
        if not self.use_prior:
            return -log_likelihood, terms
        log_prior = self.model.log_prior(params)
        return -log_likelihood - log_prior / self.size, {**terms, "log_prior": log_prior.detach()}

    def _log_likelihood(self, params: Params, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Mean over the rows, and over their adversarial copies."""
        if self.attack is None:
            return self._mean_score(params, x, y, weights)
        x = x.detach().requires_grad_()
        clean = self._mean_score(params, x, y, weights)
        (slope,) = torch.autograd.grad(clean, x, retain_graph=True)
        return 0.5 * (clean + self._mean_score(params, (x - self.attack * slope.sign()).detach(), y, weights))

    def _mean_score(self, params: Params, x: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        output = self.model.forward(params, x, buffers=self.net_buffers, training=True)
        scores = self.model.score(output, y, params)
        return scores.mean() if weights is None else (weights * scores).mean()

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows."""
        params = self.params()
        return self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params)


def fit_point(
    job: FitJob, settings: TrainingSettings, *, use_prior: bool = True, objective: PointObjective | None = None
) -> Particles:
    """Train one set of parameters and return it as a posterior with one atom.

    A method that has an objective of its own, for the same model and data, passes it in.
    """
    model, method = job.model, job.method
    if objective is None and use_prior:
        refuse_learned_prior(method, model)
    objective = objective or PointObjective(model, job.rows.size, use_prior=use_prior)
    result = train(objective, job.rows, settings, **job.options)
    params = {name: value.detach() for name, value in objective.params().items()}
    random = {name: params[name].unsqueeze(0).clone() for name in model.random_names}
    points = {name: params[name] for name in model.point_names}
    return Particles(
        model, random, points=points, buffers=objective.net_buffers, seed=job.seed,
        diagnostics=training_diagnostics(method, model, result, params),
    )  # fmt: skip


def training_diagnostics(
    method: Method, model: Model, result: TrainingResult, params: Params, terms: dict[str, float] | None = None,
    notes: tuple[str, ...] = (),
) -> Diagnostics:  # fmt: skip
    """Diagnostics of a fit: the terms of its last record, and the likelihood's own parameters."""
    last = {k: v for k, v in result.history[-1].items() if k not in ("step", "epoch")} if result.history else {}
    own = {name: torch.as_tensor(value).mean().item() for name, value in model.likelihood_params(params).items()}
    return Diagnostics(
        method=repr(method), terms={**last, **own, **(terms or {})}, history=result.history, converged=result.converged,
        interrupted=result.interrupted, message=result.message, seconds=result.seconds, notes=notes,
        out_of_time=result.out_of_time,
    )  # fmt: skip


def refuse_learned_prior(method: Method, model: Model) -> None:
    """Refuse to maximise the joint density over the weights and the prior's scale."""
    if model.hyper_names:
        raise Unsupported(
            f"{type(method).__name__} cannot learn the prior's own scale: the joint density grows without bound as "
            f"weights and scale shrink together. Use a method that integrates over the weights, such as MeanFieldVI, "
            f"or give the prior a fixed scale."
        )


# --- Maximum a posteriori: the mode of the posterior -----------------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class MAP(Trained, Method):
    r"""The most probable weights: ordinary training, with the prior as its regulariser.

    .. math:: \hat\theta = \arg\max_\theta \; \log p(D \mid \theta) + \log p(\theta)

    With ``Normal(s)`` as prior this is weight decay of strength 1/s² on the full-data scale. The result is a
    posterior with one atom, without any uncertainty about the weights (see MacKay, 1992, for why that matters).

    Args:
        epochs: Passes over the data; None stops when the objective has converged.
        learning_rate: Step size; None chooses it from the number of parameters D (0.01 up to 10,000, then 1/√D down to
            0.001).
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, patience of early stopping, divergence and accumulation:
            ``kn.Training(...)``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MAP(epochs=200).fit(model, (x, x.sum(1)))
        >>> len(posterior)
        1
    """

    family = "point"
    summary = "the most probable weights: ordinary training with the prior as regulariser"
    references = ("mackay1992",)
    supports_row_weights = True

    def _fit(self, job: FitJob) -> Particles:
        return fit_point(job, self.training_settings())


# --- Maximum likelihood: ordinary training, without a prior ----------------------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class MaximumLikelihood(Trained, Method):
    r"""The weights under which the data is most probable. The prior is ignored.

    .. math:: \hat\theta = \arg\max_\theta \sum_n \log p(y_n \mid x_n, \theta)

    The baseline every Bayesian method is compared with. Networks with many weights overfit by it: pass ``validation``
    to stop early.

    Args:
        epochs: Passes over the data; None stops when the objective has converged.
        learning_rate: Step size; None chooses it from the number of parameters D (0.01 up to 10,000, then 1/√D down to
            0.001).
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, patience of early stopping, divergence and accumulation:
            ``kn.Training(...)``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1))
        >>> kn.MaximumLikelihood(epochs=200).fit(model, (x, x.sum(1))).diagnostics.message
        'ended after 200 steps'
    """

    family = "point"
    summary = "ordinary training without a prior: the baseline"
    aliases = ("ml", "mle")
    references = ("mackay1992",)
    supports_row_weights = True

    def _fit(self, job: FitJob) -> Particles:
        return fit_point(job, self.training_settings(), use_prior=False)
