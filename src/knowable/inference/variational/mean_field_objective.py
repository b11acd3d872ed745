"""The evidence lower bound of a mean-field Gaussian, with the gradient estimator of one's choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.objective import Objective
from knowable.core.params import Layout
from knowable.core.randomness import fast_randn
from knowable.core.types import Params
from knowable.inference.variational.divergence import (
    HALF_LOG_TWO_PI_E,
    fixed_normal,
    other_divergence,
    stretches_of,
)
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
from knowable.inference.variational.score_function import score_surrogate

ESTIMATORS = ("auto", "local", "weight", "flipout", "score", "local_score")
BY_SCORE = ("score", "local_score")
"""Estimators that need no gradient of the likelihood."""
_VALIDATION_DRAWS = 8


class MeanFieldObjective(Objective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)`, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, \big(\mathrm{KL}(q \,\|\, p) - (T - 1)\, H[q]\big)

    with β and the temperature T both 1 for Bayes. The entropy H counted T times leads to the tempered posterior
    :math:`p(\theta \mid D)^{1/T}`, as in the samplers.

    Attributes:
        q: Means and log scales of all random parameters, one buffer ``(2, D)``: those drawn as weights first, then
            those whose layers are sampled locally.
        points: Parameters that are point estimates.
    """

    recordable = True

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        estimator: str = "auto",
        draws: int = 1,
        beta: float = 1.0,
        temperature: float = 1.0,
        kl_warmup: int = 0,
        initial_scale: float = 0.02,
        start: Params | None = None,
    ):
        super().__init__(model, size)
        self.estimator, self.draws, self.kl_warmup = estimator, draws, kl_warmup
        self.beta, self.temperature = beta, temperature
        params = {**model.params(), **(start or {})}
        drawn, local = _plan(model, x, estimator)
        self.drawn = Layout.of({name: params[name] for name in drawn})
        self.local = Layout.of({name: params[name] for name in local})
        self.layout = Layout.of({name: params[name] for name in (*drawn, *local)})
        loc = self.layout.flatten(params)
        self.q = nn.Parameter(torch.stack([loc, torch.full_like(loc, math.log(initial_scale))]))
        self.point_names = model.point_names
        self.points = nn.ParameterList([nn.Parameter(params[name].detach().clone()) for name in self.point_names])
        self.plan = Plan(self.drawn, self.local, tuple(stretches_of(self.layout, model)))
        self.others = [name for name in self.layout.names if fixed_normal(model.prior.prior_of(name)) is None]

    @property
    def settles_from(self) -> float:
        """The end of the KL's warm-up."""
        return float(self.kl_warmup)

    # --- the variational distribution --------------------------------------------------------------------------------

    def point_params(self) -> Params:
        """The point estimates, by name."""
        return dict(zip(self.point_names, self.points, strict=True))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        return self.layout.views(self.q[0]), self.layout.views(self.q[1].exp())

    def divergence(self, params: Params | None = None) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""
        loc, scale = self.loc_and_scale()
        flat = self.q[0], self.q[1], self.q[1].exp()
        total = other_divergence(self.model, self.others, loc, scale, params or self.point_params(), max(8, self.draws))
        return total + sum(stretch.value(*flat) for stretch in self.plan.stretches)

    def entropy(self) -> Tensor:
        """H[q] in closed form."""
        return self.q[1].sum() + HALF_LOG_TWO_PI_E * self.layout.size

    # --- the bound ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        if self.estimator in BY_SCORE:
            log_likelihood, kl = score_surrogate(self, x, y, points)
        else:
            log_likelihood, kl = self._reparameterised(x, y, points)
        if self.others:
            loc, scale = self.loc_and_scale()
            kl = kl + other_divergence(self.model, self.others, loc, scale, points, self.draws)
        penalty = kl if self.temperature == 1.0 else kl - (self.temperature - 1.0) * self.entropy()
        loss = -log_likelihood + (self.beta * self._warmth() / self.size) * penalty
        terms = {"expected_log_likelihood": log_likelihood.detach() * self.size, "kl": kl.detach()}
        if points:
            log_prior = self._log_prior_of_points(points)
            loss, terms["log_prior_of_points"] = loss - log_prior / self.size, log_prior.detach()
        return loss, terms

    def noise(self) -> Tensor:
        """Standard normal noise for the weights that are drawn, ``(draws, drawn weights)``."""
        if self.recording:  # noise from elsewhere would be the same at every step
            return torch.randn((self.draws, self.drawn.size), dtype=self.q.dtype, device=self.q.device)
        return fast_randn(self.draws, self.drawn.size, like=self.q)

    def draw(self, noise: Tensor) -> tuple[Tensor, Params, Params, list[Params]]:
        """KL, means and variances of local weights, and the draws, from ``noise``, which may be used up."""
        make = draw_by_autograd if self.recording else DrawAndDivergence.apply
        return self.plan.named(make(self.q, noise, self.plan), len(noise))

    def _reparameterised(self, x: Tensor, y: Tensor, points: Params) -> tuple[Tensor, Tensor]:
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

    def log_likelihood_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Mean log likelihood of a batch, in training mode."""
        return self.scores_of(x, y, params).mean()

    def scores_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood of each row of a batch, in training mode."""
        if self.recording:
            rules = PairRules(params)
            with rules:
                output = self.model.forward(rules.params, x, buffers=self.net_buffers, training=True)
        else:
            output = self.model.forward(params, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params)

    def _log_prior_of_points(self, points: Params) -> Tensor:
        total = torch.zeros((), dtype=self.q.dtype, device=self.q.device) + self.model.prior.log_hyperprior(points)
        for name, value in points.items():
            prior = None if name in self.model.hyper_names else self.model.prior.bound(name, points)
            total = total if prior is None else total + prior.log_prob(value).sum()
        return total

    def _warmth(self) -> float:
        return min(1.0, (self.epoch + 1.0) / (self.kl_warmup + 1.0)) if self.kl_warmup else 1.0

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few weight draws, in evaluation mode."""
        noise = torch.randn((_VALIDATION_DRAWS, self.layout.size), dtype=self.q.dtype, device=self.q.device)
        weights = torch.addcmul(self.q[0], self.q[1].exp(), noise)
        points = self.point_params()
        each = []
        for draw in weights:
            params = {**points, **self.layout.views(draw)}
            each.append(self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params))
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)


def _plan(model: Model, x: Tensor, estimator: str) -> tuple[list[str], list[str]]:
    """Which parameters are drawn as weights and which are left to their layer's own rule, equal priors together."""
    usage = Usage() if estimator in ("weight", "score") else trace_usage(model, x)
    wanted = "auto" if estimator == "local_score" else estimator  # only where it is exact
    local = [name for name in model.random_names if usage.suits(name, wanted)]
    drawn = [name for name in model.random_names if name not in set(local)]
    return _by_prior(drawn, model), _by_prior(local, model)


def _by_prior(names: list[str], model: Model) -> list[str]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(repr(model.prior.prior_of(name)), []).append(name)
    return [name for group in groups.values() for name in group]
