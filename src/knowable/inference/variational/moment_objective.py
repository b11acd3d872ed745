"""The evidence lower bound of independent normals by moments: a loss without noise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from knowable.core.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.reparameterise import Plan
from knowable.core.types import Params
from knowable.inference.variational.expected_likelihood import check_likelihood, expected_log_likelihood
from knowable.inference.variational.mean_field_objective import MeanFieldObjective
from knowable.inference.variational.moment_network import check_layers, propagate
from knowable.inference.variational.moment_posterior import LIMIT, MomentNormal
from knowable.inference.variational.moments import Moments


class MomentObjective(MeanFieldObjective):
    """-ELBO / N of independent normals, whose expected log likelihood is computed from the moments of the outputs.

    Args:
        model: The model; layers and likelihoods without a rule are refused.
        x: Inputs that look like the data.
        size: Number of training examples N.
        beta: Factor on the KL.
        temperature: How often the entropy counts.
        kl_warmup: Epochs over which that factor rises to its full value.
        initial_scale: Standard deviation all weights start with.
        start: First means.
        limit: The widest linear layer whose outputs' covariances are followed.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        beta: float = 1.0,
        temperature: float = 1.0,
        kl_warmup: int | None = 0,
        initial_scale: float = 0.02,
        start: Params | None = None,
        limit: int = 64,
    ):
        check_likelihood(model.likelihood)
        check_layers(model, x, limit=limit)
        super().__init__(
            model, x, size, estimator="weight", beta=beta, temperature=temperature, kl_warmup=kl_warmup,
            initial_scale=initial_scale, start=start,
        )  # fmt: skip
        self.limit = limit
        self.drawn, self.local = Layout.of({}), self.layout  # no weight is drawn
        self.plan = Plan(self.drawn, self.local, self.plan.stretches)

    def posterior(self, **common: Any) -> MomentNormal:
        """Independent normals, that predict by moments."""
        loc, scale = self.loc_and_scale()
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        return MomentNormal(self.model, loc, scale, limit=max(LIMIT, self.limit), **about)

    def reparameterised(self, x: Tensor, y: Tensor, points: Params) -> tuple[Tensor, Tensor]:
        """Expected log likelihood per example and KL, by moments: no weight is drawn."""
        kl, loc, variance, _ = self.draw(self.noise())
        params = {name: Moments(value, variance.get(name)) for name, value in {**points, **loc}.items()}
        output = propagate(self.model, params, x, buffers=self.net_buffers, training=True, limit=self.limit)
        own = likelihood_moments(self.model, params)
        return expected_log_likelihood(self.model.likelihood, output, y, own).mean(), kl


def likelihood_moments(model: Model, params: dict[str, Moments]) -> dict[str, Moments]:
    """Moments of the likelihood's own parameters, by short name."""
    means = model.likelihood_params({name: value.mean for name, value in params.items()})
    found = {name: params.get(LIKELIHOOD_PREFIX + name) for name in means}
    return {name: found[name] or Moments(value) for name, value in means.items()}
