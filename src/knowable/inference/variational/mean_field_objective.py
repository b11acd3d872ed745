"""The evidence lower bound of a mean-field Gaussian, with the gradient estimator of one's choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.gaussian_weight import (
    GaussianPair,
    GaussianWeight,
    PairRules,
    Usage,
    flipout_rule,
    local_rule,
    trace_usage,
)
from knowable.core.model import Model
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.params import Layout
from knowable.core.randomness import fast_randn
from knowable.core.types import Params
from knowable.core.variational_objective import VariationalObjective, first_values
from knowable.inference.variational.divergence import (
    entropy_of_normals,
    fixed_normal,
    other_divergence,
    stretches_of,
)
from knowable.inference.variational.reparameterise import DrawAndDivergence, Plan, draw_by_autograd
from knowable.inference.variational.score_function import score_surrogate

ESTIMATORS = ("auto", "local", "weight", "flipout", "score", "local_score")
BY_SCORE = ("score", "local_score")
"""Estimators that need no gradient of the likelihood."""


class MeanFieldObjective(VariationalObjective):
    r"""-ELBO / N of :math:`q(\theta) = \prod_d \mathcal{N}(m_d, s_d^2)`, on the full-data scale.

    .. math:: \mathrm{ELBO} = E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, \big(\mathrm{KL}(q \,\|\, p) - (T - 1)\, H[q]\big)

    with β and the temperature T both 1 for Bayes.

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
        super().__init__(model, size, draws=draws, beta=beta, temperature=temperature, kl_warmup=kl_warmup, start=start)
        self.estimator = estimator
        params = first_values(model, start)
        drawn, local = _plan(model, x, estimator)
        self.drawn = Layout.of({name: params[name] for name in drawn})
        self.local = Layout.of({name: params[name] for name in local})
        self.layout = Layout.of({name: params[name] for name in (*drawn, *local)})
        loc = self.layout.flatten(params)
        self.q = nn.Parameter(torch.stack([loc, torch.full_like(loc, math.log(initial_scale))]))
        self.plan = Plan(self.drawn, self.local, tuple(stretches_of(self.layout, model)))
        self.others = [name for name in self.layout.names if fixed_normal(model.prior.prior_of(name)) is None]

    # --- the variational distribution --------------------------------------------------------------------------------

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        return self.layout.views(self.q[0]), self.layout.views(self.q[1].exp())

    def posterior(self, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        loc, scale = self.loc_and_scale()
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        return DiagonalNormal(self.model, loc, scale, **about)

    def draw_weights(self, count: int) -> list[Params]:
        """Draws of all random parameters, whatever the estimator."""
        noise = torch.randn((count, self.layout.size), dtype=self.q.dtype, device=self.q.device)
        return [self.layout.views(draw) for draw in torch.addcmul(self.q[0], self.q[1].exp(), noise)]

    def divergence(self) -> Tensor:
        """KL(q ‖ p) with as little Monte Carlo as the priors allow."""
        loc, scale = self.loc_and_scale()
        flat = self.q[0], self.q[1], self.q[1].exp()
        total = other_divergence(self.model, self.others, loc, scale, self.point_params(), max(8, self.draws))
        return total + sum(stretch.value(*flat) for stretch in self.plan.stretches)

    def entropy(self) -> Tensor:
        """H[q] in closed form."""
        return entropy_of_normals(self.q[1])

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
        return self.loss_and_terms(log_likelihood, kl, points)

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

    def scores_of(self, x: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood of each row of a batch, in training mode."""
        if not self.recording:
            return super().scores_of(x, y, params)
        rules = PairRules(params)
        with rules:
            output = self.model.forward(rules.params, x, buffers=self.net_buffers, training=True)
        return self.model.score(output, y, params)


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
