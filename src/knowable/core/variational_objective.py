"""What the objectives of variational methods have in common: all of the bound but the distribution itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.objective import Objective
from knowable.core.posterior import Posterior
from knowable.core.types import Params
from knowable.errors import Unsupported

_VALIDATION_DRAWS = 8


def first_values(model: Model, start: Params | None) -> Params:
    """Copies of the values to begin at: those in ``start``, and the model's own for the rest."""
    return {**model.params(), **{name: value.detach().clone() for name, value in (start or {}).items()}}


class VariationalObjective(Objective):
    r"""-ELBO / N of a distribution q over the random parameters, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, \big(\mathrm{KL}(q \,\|\, p) - (T - 1)\, H[q]\big)

    with β and the temperature T both 1 for Bayes. The entropy H counted T times leads to the tempered posterior
    :math:`p(\theta \mid D)^{1/T}`, as in the samplers.

    Args:
        model: The model.
        size: Number of training examples N.
        draws: Weight draws in a step.
        beta: Factor on the KL; 1 is Bayes.
        temperature: How often the entropy counts; 1 is Bayes.
        kl_warmup: Epochs over which it rises to its full value.
        start: Values to begin at, where they are not the model's own.

    Attributes:
        points: Parameters that are point estimates.
    """

    def __init__(
        self,
        model: Model,
        size: int,
        *,
        draws: int = 1,
        beta: float = 1.0,
        temperature: float = 1.0,
        kl_warmup: int | None = 0,
        start: Params | None = None,
    ):
        super().__init__(model, size)
        self.draws, self.kl_warmup = draws, kl_warmup or 0
        self.beta, self.temperature = beta, temperature
        first = first_values(model, start)
        self.point_names = model.point_names
        self.points = nn.ParameterList([nn.Parameter(first[name]) for name in self.point_names])

    @property
    def settles_from(self) -> float:
        """The end of the KL's warm-up."""
        return float(self.kl_warmup)

    # --- what a distribution defines ---------------------------------------------------------------------------------

    @abstractmethod
    def divergence(self) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""

    def entropy(self) -> Tensor:
        """H[q], in closed form or estimated; asked for at a temperature other than 1 alone."""
        raise Unsupported(f"{type(self).__name__} has no entropy of its distribution: its temperature must be 1.")

    @abstractmethod
    def draw_weights(self, count: int) -> list[Params]:
        """Draws of the random parameters, by name, from the global generator."""

    @abstractmethod
    def posterior(self, **common: Any) -> Posterior:
        """The distribution as it is now; ``common`` goes to :class:`~knowable.core.posterior.Posterior`."""

    # --- the bound ---------------------------------------------------------------------------------------------------

    def point_params(self) -> Params:
        """The point estimates, by name."""
        return dict(zip(self.point_names, self.points, strict=True))

    def log_likelihood_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Mean log likelihood of a batch, in training mode."""
        return self.scores_of(x, y, params).mean()

    def scores_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood of each row of a batch, in training mode."""
        output = self.model.forward(params, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params)

    def loss_and_terms(
        self, log_likelihood: Tensor, kl: Tensor, points: Params, *, entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss from the mean log likelihood of a row and the KL; its terms are on the full-data scale.

        An ``entropy`` that is at hand (from the same draws as the KL) is used at a temperature other than 1.
        """
        penalty = kl
        if self.temperature != 1.0:
            penalty = kl - (self.temperature - 1.0) * (self.entropy() if entropy is None else entropy)
        loss = -log_likelihood + (self.beta * self.warmth() / self.size) * penalty
        terms = {"expected_log_likelihood": log_likelihood.detach() * self.size, "kl": kl.detach()}
        if points:
            log_prior = self.log_prior_of_points(points)
            loss, terms["log_prior_of_points"] = loss - log_prior / self.size, log_prior.detach()
        return loss, terms

    def log_prior_of_points(self, points: Params) -> Tensor:
        """Log prior of the point estimates, and hyperprior of the prior's own scales."""
        total = torch.zeros((), dtype=self.model.dtype, device=self.model.device)
        total = total + self.model.prior.log_hyperprior(points)
        for name, value in points.items():
            prior = None if name in self.model.hyper_names else self.model.prior.bound(name, points)
            total = total if prior is None else total + prior.log_prob(value).sum()
        return total

    def warmth(self) -> float:
        """The share of its full weight that the KL has now."""
        return min(1.0, (self.epoch + 1.0) / (self.kl_warmup + 1.0)) if self.kl_warmup else 1.0

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few weight draws, in evaluation mode."""
        points = self.point_params()
        each = []
        for draw in self.draw_weights(_VALIDATION_DRAWS):
            params = {**points, **draw}
            each.append(self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params))
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)
