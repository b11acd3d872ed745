"""The evidence lower bound (ELBO): the loss of every variational method, whatever its distribution."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.posterior import Posterior
from knowable.core.training.objective import Objective
from knowable.errors import Unsupported
from knowable.inference.variational.gaussian_weight import PairRules

_VALIDATION_DRAWS = 8


class VariationalObjective(Objective):
    r"""-ELBO / N of a distribution q over the random parameters. Each method has one final subclass.

    A subclass holds the variational parameters, and its ``forward`` reads as the formula: draw :math:`\theta \sim q`,
    take the :func:`expected_log_likelihood`, compute the KL, and return the :func:`negative_elbo`.
    """

    symmetric: bool = False  # whether q is symmetric about its mean
    diagonal: bool = False  # whether q has nothing but means and scales
    stretches: bool = False  # whether q stays in its family when it is stretched along one direction of its own

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

    # --- what a distribution defines ---------------------------------------------------------------------------------

    @abstractmethod
    def kl_divergence(self) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""

    def entropy(self) -> Tensor:
        """H[q], in closed form or estimated; needed only at a temperature other than 1."""
        raise Unsupported(f"{type(self).__name__} has no entropy of its distribution: its temperature must be 1.")

    @abstractmethod
    def draw_weights(self, count: int) -> list[Params]:
        """Draws of the random parameters, by name, from the global generator."""

    @abstractmethod
    def posterior(self, **common: Any) -> Posterior:
        """The current distribution; ``common`` goes to :class:`~knowable.core.posterior.posterior.Posterior`."""

    def present_posterior(self) -> Posterior:
        """The distribution as it is now, which further training does not change."""
        return copy.deepcopy(self.posterior())

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """Become the q that is nearest to a normal, in KL(q ‖ normal).

        Args:
            mean: In double precision, ``(D,)``, in the order of the model's random parameters.
            precision: ``(D, D)``, positive definite.
        """
        raise Unsupported(f"{type(self).__name__} has no rule for the distribution nearest to a normal.")

    def exact_elbo(self, data: Data) -> Tensor | None:
        """The ELBO over all rows without noise, differentiable, where the method maximises one like that; else None."""
        return None

    # --- what the parts of the ELBO need -----------------------------------------------------------------------------

    def kl_weight(self) -> float:
        """The factor on the KL: β, and less during the warm-up."""
        return self.beta * min(1.0, (self.epoch + 1.0) / (self.kl_warmup + 1.0))

    @property
    def settles_from(self) -> float:
        """The end of the KL warm-up."""
        return float(self.kl_warmup)

    def point_params(self) -> Params:
        """The point estimates, by name."""
        return dict(zip(self.point_names, self.points, strict=True))

    def shared(self, common: dict[str, Any]) -> dict[str, Any]:
        """What every posterior is given: point estimates and buffers, and ``common``."""
        return {"points": self.point_params(), "buffers": self.net_buffers, **common}

    def log_likelihood(self, x: Tensor, y: Tensor, params: Params, weights: Tensor | None = None) -> Tensor:
        """Log likelihood of each row of a batch (times its weight), in training mode, ``(batch,)``."""
        if not self.recording:
            output = self.model.forward(params, x, buffers=self.net_buffers, training=True)
        else:  # a recording takes no tensor subclasses
            with PairRules(params) as rules:
                output = self.model.forward(rules.params, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params, weights)

    def log_prior_of_points(self, points: Params) -> Tensor:
        """Log prior of the point estimates, and hyperprior of the prior's own scales."""
        total = torch.zeros((), dtype=self.model.dtype, device=self.model.device)
        total = total + self.model.prior.log_hyperprior(points)
        for name, value in points.items():
            prior = None if name in self.model.hyper_names else self.model.prior.bound(name, points)
            total = total if prior is None else total + prior.log_prob(value).sum()
        return total

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few weight draws, in evaluation mode."""
        points = self.point_params()
        each = []
        for draw in self.draw_weights(_VALIDATION_DRAWS):
            params = {**points, **draw}
            each.append(self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params))
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)


def expected_log_likelihood(
    objective: VariationalObjective,
    x: Tensor,
    y: Tensor,
    points: Params,
    draws: Sequence[Params],
    weights: Tensor | None = None,
) -> Tensor:
    r"""The mean log likelihood of a row over draws :math:`\theta \sim q`, through which its gradient passes."""
    each = [objective.log_likelihood(x, y, {**points, **draw}, weights).mean() for draw in draws]
    return sum(each[1:], each[0]) / len(each)


def negative_elbo(
    objective: VariationalObjective,
    log_likelihood: Tensor,
    kl: Tensor,
    points: Params,
    *,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    r"""The loss -ELBO / N, and its terms on the full-data scale.

    .. math:: \mathrm{ELBO} = \frac{N}{M} \sum_m E_q[\log p(y_m \mid x_m, \theta)]
        - \beta\, \big(\mathrm{KL}(q \,\|\, p) - (T - 1)\, H[q]\big) + \log p(\text{points})

    With β and the temperature T both 1 this is Bayes. Counting the entropy H T times leads to the tempered posterior
    :math:`p(\theta \mid D)^{1/T}`, as in the samplers.
    """
    size, temperature = objective.size, objective.temperature
    penalty = kl
    if temperature != 1.0:
        penalty = kl - (temperature - 1.0) * (objective.entropy() if entropy is None else entropy)
    loss = -log_likelihood + (objective.kl_weight() / size) * penalty
    terms = {"expected_log_likelihood": log_likelihood.detach() * size, "kl": kl.detach()}
    if points:
        log_prior = objective.log_prior_of_points(points)
        loss, terms["log_prior_of_points"] = loss - log_prior / size, log_prior.detach()
    return loss, terms


def first_values(model: Model, start: Params | None) -> Params:
    """Copies of the values to begin at: those in ``start``, and the model's own for the rest."""
    return {**model.params(), **{name: value.detach().clone() for name, value in (start or {}).items()}}
