"""The bound of multiplicative Gaussian noise on the weights, of a strength that is set or learned."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model import Model
from knowable.core.normal_objective import NormalObjective
from knowable.core.params import Layout
from knowable.core.types import Params
from knowable.inference.dropout.noisy_weights import NoisyWeights
from knowable.priors.log_uniform import divergence_at

SHARES = ("layer", "neuron", "weight")
_INITIAL_SHARE = 0.25  # of the largest alpha, at which a learned one starts


class NoiseObjective(NormalObjective):
    r"""-ELBO / N of :math:`w = \theta\, (1 + \sqrt{\alpha}\, \epsilon)` under the log-uniform prior.

    The KL is a function of α alone. A learned α is :math:`\alpha_\max\, \sigma(a)`. Weights of ``zero_mean`` have no θ:
    they are :math:`\mathcal{N}(0, \sigma^2)` with σ learned, whose KL is the same whatever σ is; this is the limit of
    infinite α, where it is 0.

    Args:
        model: The model, with its log-uniform priors.
        x: Rows like those of the data.
        size: Number of training examples N.
        alpha: Strength of the noise, or the largest where it is learned.
        share: What has an α of its own: ``"layer"``, ``"neuron"`` (a weight's first dimension) or ``"weight"``. None:
            α is not learned.
        zero_mean: Names of the weights without a mean.
        common: See :class:`~knowable.core.normal_objective.NormalObjective`.

    Attributes:
        theta: Means of the weights that have one, end to end.
        logits: The numbers a of all groups, end to end; empty where α is set.
        log_sigma: Log scales of the weights without a mean, end to end.
    """

    recordable = True

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        alpha: float,
        share: str | None = None,
        zero_mean: tuple[str, ...] = (),
        **common: Any,
    ):
        super().__init__(model, x, size, estimator="local", **common)
        self.alpha, self.share = alpha, share
        first = {name: self.first[name] for name in self.layout.names}
        del self.first
        like = next(iter(first.values()))
        self.with_mean = Layout.of({name: value for name, value in first.items() if name not in zero_mean})
        self.without = Layout.of({name: value for name, value in first.items() if name in zero_mean})
        groups = {name: _group(first[name], share) for name in self.with_mean.names} if share is not None else {}
        self.groups = Layout.of(groups)
        self.theta = nn.Parameter(self.with_mean.flatten(first).to(like))
        self.logits = nn.Parameter(torch.full((self.groups.size,), _logit(_INITIAL_SHARE)).to(like))
        self.log_sigma = nn.Parameter(
            self.without.flatten({k: _log_size(first[k]) for k in self.without.names}).to(like)
        )

    # --- the distribution --------------------------------------------------------------------------------------------

    def log_alphas(self) -> Params:
        """Log α of each weight that has a mean, of a shape that broadcasts to the weight's."""
        if self.share is None:
            fixed = self.theta.new_tensor(math.log(self.alpha))
            return dict.fromkeys(self.with_mean.names, fixed)
        return self.groups.views(math.log(self.alpha) + nn.functional.logsigmoid(self.logits))

    def loc_and_scale(self) -> tuple[Params, Params]:
        """Means and standard deviations of the random parameters, by name, differentiable."""
        loc, shift = self._loc_and_shift()
        return loc, {name: value.abs() for name, value in shift.items()}

    def _loc_and_shift(self) -> tuple[Params, Params]:
        """Means, and what a standard normal number is multiplied by: √α θ, or σ."""
        log_alphas = self.log_alphas()
        loc = self.with_mean.views(self.theta)
        shift = {name: value * (0.5 * log_alphas[name]).exp() for name, value in loc.items()}
        sigma = self.without.views(self.log_sigma.exp())
        loc = {**loc, **{name: torch.zeros_like(value) for name, value in sigma.items()}}
        return _in_order(self.layout, loc), _in_order(self.layout, {**shift, **sigma})

    def posterior(self, **common: Any) -> NoisyWeights:
        """Independent normals."""
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        return NoisyWeights(self.model, *self.loc_and_scale(), **about)

    def divergence(self) -> Tensor:
        """KL(q ‖ p), up to the constant of the improper prior."""
        log_alphas = self.log_alphas()
        sizes = zip(self.with_mean.names, self.with_mean.sizes, strict=True)
        each = [divergence_at(log_alphas[name]).mean() * size for name, size in sizes]
        return torch.stack(each).sum() if each else self.theta.new_zeros(())

    def draw(self, noise: Tensor) -> tuple[Tensor, Params, Params, list[Params]]:
        """KL, means and variances of local weights, and the draws."""
        loc, shift = self._loc_and_shift()
        variance = {name: shift[name].square() for name in self.local.names}
        draws = [
            {name: torch.addcmul(loc[name], shift[name], value) for name, value in self.drawn.views(each).items()}
            for each in noise
        ]
        return self.divergence(), {name: loc[name] for name in self.local.names}, variance, draws

    # --- records -----------------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, float]:
        """The mean α of each weight, where it is learned."""
        if self.share is None:
            return {}
        with torch.no_grad():
            return {f"alpha.{name}": value.exp().mean().item() for name, value in self.log_alphas().items()}


def _group(weight: Tensor, share: str | None) -> Tensor:
    """One number for each α of the weight."""
    if share == "weight":
        return torch.zeros_like(weight)
    shape = [1] * weight.dim()
    if share == "neuron":
        shape[0] = len(weight)
    return weight.new_zeros(shape)


def _log_size(weight: Tensor) -> Tensor:
    """Log of the root mean square of the weight, everywhere; that of a thousandth where it is all zeros."""
    size = weight.square().mean().sqrt().clamp_min(1e-3)
    return size.log().expand(weight.shape)


def _logit(p: float) -> float:
    return math.log(p / (1 - p))


def _in_order(layout: Layout, values: Params) -> Params:
    return {name: values[name] for name in layout.names}
