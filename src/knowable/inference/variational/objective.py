"""What the objectives of variational methods have in common: all of the bound but the distribution itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import fast_randn
from knowable.core.training.objective import Objective
from knowable.errors import Unsupported
from knowable.inference.variational.divergence import closed_stretches_of, entropy_of_normals, other_divergence
from knowable.inference.variational.gaussian_weight import (
    GaussianPair,
    GaussianWeight,
    PairRules,
    Usage,
    flipout_rule,
    local_rule,
    trace_usage,
)
from knowable.inference.variational.reparameterise import DrawAndDivergence, Plan, draw_by_autograd

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
        """The distribution as it is now; ``common`` goes to :class:`~knowable.core.posterior.posterior.Posterior`."""

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


# --- The evidence lower bound of independent normals, by local reparameterisation or weight draws --------------------

BY_WEIGHTS = ("weight", "score")
"""Estimators that draw all weights."""


class NormalObjective(VariationalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)`, whatever m and s are functions of.

    Args:
        model: The model.
        x: Rows like those of the data: the network is run on a few of them to see how it uses its weights.
        size: Number of training examples N.
        estimator: ``"auto"``, ``"local"``, ``"flipout"`` or ``"weight"``, see ``MeanFieldVI``.
        start: Values to begin at, where they are not the model's own.
        common: See :class:`~knowable.inference.variational.objective.VariationalObjective`.

    Attributes:
        drawn: The weights that are drawn, the first ones of ``layout``.
        local: The others, whose layers are sampled locally.
        layout: All random parameters.
    """

    def __init__(
        self, model: Model, x: Tensor, size: int, *, estimator: str, start: Params | None = None, **common: Any
    ):
        super().__init__(model, size, start=start, **common)
        self.estimator = estimator
        self.first = first_values(model, start)
        drawn, local = _plan(model, x, estimator)
        self.drawn = Layout.of({name: self.first[name] for name in drawn})
        self.local = Layout.of({name: self.first[name] for name in local})
        self.layout = Layout.of({name: self.first[name] for name in (*drawn, *local)})

    # --- what a parameterisation defines -----------------------------------------------------------------------------

    @abstractmethod
    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""

    @abstractmethod
    def draw(self, noise: Tensor) -> tuple[Tensor, Params, Params, list[Params]]:
        """KL, means and variances of local weights, and the draws, from ``noise``, which may be used up."""

    # --- the variational distribution --------------------------------------------------------------------------------

    def posterior(self, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        loc, scale = self.loc_and_scale()
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        return DiagonalNormal(self.model, loc, scale, **about)

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all random parameters, whatever the estimator."""
        loc, scale = (self.layout.flatten(each) for each in self.loc_and_scale())
        noise = torch.randn((count, self.layout.size), dtype=loc.dtype, device=loc.device)
        return [self.layout.views(draw) for draw in torch.addcmul(loc, scale, noise)]

    def entropy(self) -> Tensor:
        """H[q] in closed form."""
        return entropy_of_normals(self.layout.flatten(self.loc_and_scale()[1]).log())

    # --- the bound ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        return self.loss_and_terms(*self.reparameterised(x, y, points), points)

    def noise(self) -> Tensor:
        """Standard normal noise for the weights that are drawn, ``(draws, drawn weights)``."""
        like = next(self.parameters())
        if self.recording:  # noise from elsewhere would be the same at every step
            return torch.randn((self.draws, self.drawn.size), dtype=like.dtype, device=like.device)
        return fast_randn(self.draws, self.drawn.size, like=like)

    def reparameterised(self, x: Tensor, y: Tensor, points: Params) -> tuple[Tensor, Tensor]:
        """Expected log likelihood per example and KL, differentiable through the draws."""
        kl, loc, variance, draws = self.draw(self.noise())
        each = [
            self.log_likelihood_of(x, y, {**points, **draw, **self._local_weights(loc, variance)}) for draw in draws
        ]
        return sum(each[1:], each[0]) / len(each), kl

    def _local_weights(self, loc: Params, variance: Params) -> Params:
        return self.with_rule(loc, variance, flipout_rule if self.estimator == "flipout" else local_rule)

    def with_rule(self, loc: Params, variance: Params, rule: Callable[..., Tensor]) -> Params:
        """Weights that are left to their layers, whose operations follow the rule."""
        kind: Any = GaussianPair if self.recording else GaussianWeight
        return {name: kind(loc[name], variance[name], rule) for name in loc}

    def scores_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood of each row of a batch, in training mode."""
        if not self.recording:
            return super().scores_of(x, y, params)
        rules = PairRules(params)
        with rules:
            output = self.model.forward(rules.params, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params)


class FlatNormalObjective(NormalObjective):
    r"""The bound with a mean and a log scale of its own for every weight, all in one buffer.

    Args:
        initial_scale: Standard deviation all weights start with.

    Attributes:
        q: Means and log scales of all random parameters, one buffer ``(2, D)``: those drawn as weights first, then
            those whose layers are sampled locally.
        others: Random parameters whose prior has no closed form over the buffer.
    """

    recordable = True

    def __init__(self, model: Model, x: Tensor, size: int, *, initial_scale: float = 0.02, **common: Any):
        super().__init__(model, x, size, **common)
        loc = self.layout.flatten(self.first)
        del self.first
        self.q = nn.Parameter(torch.stack([loc, torch.full_like(loc, math.log(initial_scale))]))
        stretches, self.others = closed_stretches_of(self.layout, model)
        self.plan = Plan(self.drawn, self.local, tuple(stretches))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        return self.layout.views(self.q[0]), self.layout.views(self.q[1].exp())

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all random parameters, whatever the estimator."""
        noise = torch.randn((count, self.layout.size), dtype=self.q.dtype, device=self.q.device)
        return [self.layout.views(draw) for draw in torch.addcmul(self.q[0], self.q[1].exp(), noise)]

    def divergence(self) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""
        flat = self.q[0], self.q[1], self.q[1].exp()
        total = self._other_divergence(self.point_params(), max(8, self.draws))
        return total + sum(stretch.value(*flat) for stretch in self.plan.stretches)

    def _other_divergence(self, points: Params, draws: int) -> Tensor:
        loc, scale = self.loc_and_scale()
        return other_divergence(self.model, self.others, loc, scale, points, draws)

    def entropy(self) -> Tensor:
        """H[q] in closed form."""
        return entropy_of_normals(self.q[1])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        log_likelihood, kl = self.estimate(x, y, points)
        if self.others:
            kl = kl + self._other_divergence(points, self.draws)
        return self.loss_and_terms(log_likelihood, kl, points)

    def estimate(self, x: Tensor, y: Tensor, points: Params) -> tuple[Tensor, Tensor]:
        """Expected log likelihood per example, and KL over the stretches."""
        return self.reparameterised(x, y, points)

    def draw(self, noise: Tensor) -> tuple[Tensor, Params, Params, list[Params]]:
        """KL, means and variances of local weights, and the draws, from ``noise``, which may be used up."""
        make = draw_by_autograd if self.recording else DrawAndDivergence.apply
        return self.plan.named(make(self.q, noise, self.plan), len(noise))


def _plan(model: Model, x: Tensor, estimator: str) -> tuple[list[str], list[str]]:
    """Which parameters are drawn as weights and which are left to their layer's own rule, equal priors together."""
    usage = Usage() if estimator in BY_WEIGHTS else trace_usage(model, x)
    wanted = "auto" if estimator == "local_score" else estimator  # only where it is exact
    local = [name for name in model.random_names if usage.suits(name, wanted)]
    drawn = [name for name in model.random_names if name not in set(local)]
    return _by_prior(drawn, model), _by_prior(local, model)


def _by_prior(names: list[str], model: Model) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(repr(model.prior.prior_of(name)), []).append(name)
    return [name for group in groups.values() for name in group]
