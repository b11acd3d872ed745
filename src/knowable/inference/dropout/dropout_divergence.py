r"""KL divergence of dropout from the prior: what makes the loss of dropout an evidence lower bound (ELBO).

Gal and Ghahramani (2016) read dropout as the distribution in which each input's column of weights is a mixture of two
narrow normals, one at zero and one at the value it has when the input is kept. With K weights in the column, mean m,
rate p and width σ,

.. math:: q(w) = p\, N(0, \sigma^2 I) + (1 - p)\, N\Big(\frac{m}{1 - p}, \sigma^2 I\Big).

Its cross-entropy with a prior is, as σ goes to 0, the prior at the two centres; for the normal prior
:math:`N(0, s^2)` it is the L2 term:

.. math:: -E_q[\log p(w)] = -p \log p(0) - (1 - p) \log p\Big(\frac{m}{1 - p}\Big)
    = \frac{\|m\|^2}{2 s^2 (1 - p)} + \frac{K}{2} \log 2 \pi s^2.

Its entropy is that of the choice between the two, and of the normals:
:math:`H(p) + \frac{K}{2} \log 2 \pi e \sigma^2`. What is computed here is

.. math:: \mathrm{KL} \simeq -E_q[\log p(w)] - H(p)

Two things are approximate in it. The entropy of the mixture is that of two components that do not overlap, which holds
where σ is small beside the weights. And the entropy of the narrow normals is left out: for a fixed σ it is a constant
without a gradient, but it means that the ELBO is known only up to that constant (as σ goes to 0, it goes to minus
infinity). The term is on the full-data scale, so there is no weight decay to choose: the usual one, in the loss per
example, is :math:`\frac{1}{2 s^2 (1 - p) N}` for the mean weights m, or :math:`\frac{1 - p}{2 s^2 N}` for
:math:`m / (1 - p)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.model.model import Model
from knowable.core.model.prior import Prior
from knowable.core.network.params import Layout, Params
from knowable.errors import Unsupported
from knowable.inference.dropout.layer_trace import DropoutSite


class DropoutDivergence:
    """KL of masked weights to the prior of a model, up to the constant of the narrow normals."""

    def __init__(self, model: Model, sites: Sequence[DropoutSite]):
        self.model, self.sites = model, sites
        start = model.params()
        like = {"dtype": model.dtype, "device": model.device}
        self._units = torch.tensor([float(site.units) for site in sites], **like)
        site_of = {place.name: index for index, site in enumerate(sites) for place in site.places}
        self._layout = Layout.of({name: start[name] for name in model.random_names})
        self._joint = model.prior.joint_normal(self._layout)
        priors = {name: model.prior.prior_of(name) for name in model.random_names}
        centred = {name: _centred_precision(prior) for name, prior in priors.items()}
        self._quadratic = [name for name, precision in centred.items() if precision is not None]
        self._others = {name: site_of.get(name) for name, precision in centred.items() if precision is None}
        self._precision = torch.tensor([centred[name] for name in self._quadratic], **like)
        self._site = torch.tensor([site_of.get(n, len(sites)) for n in self._quadratic], device=model.device).long()
        self._fixed: tuple[Tensor, Tensor] | None = None  # kept where rates are not learned
        self._constant = -sum(_log_density_at_zero(priors[name]) * start[name].numel() for name in self._quadratic)

    def __call__(self, params: Params, logits: Tensor) -> Tensor:
        """The divergence at means ``params`` and logits of the sites' rates ``(sites,)``."""
        total, factors = self._of_rates(logits)
        if self._joint is not None:
            return total + self._joint_cross_entropy(params, torch.sigmoid(logits))
        if self._quadratic:
            total = total + HalfSquares.apply(factors, *(params[name] for name in self._quadratic))
        for name, index in self._others.items():
            prior = self.model.prior.bound(name, params)
            if prior is None:
                raise Unsupported(f"Dropout needs a prior on {name!r} by itself, or one normal over all parameters.")
            total = total + cross_entropy(prior, params[name], None if index is None else torch.sigmoid(logits[index]))
        return total

    def _of_rates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The terms that depend on rates alone: constant less entropies, and the factors on squared means."""
        if self._fixed is not None:
            return self._fixed
        scale = torch.cat([1 + torch.exp(logits), logits.new_ones(1)])[self._site]  # 1 / (1 - p); 1 without masks
        found = self._constant - self._units @ entropy(logits), scale * self._precision
        self._fixed = None if logits.requires_grad else found
        return found

    def _joint_cross_entropy(self, params: Params, rates: Tensor) -> Tensor:
        r"""The cross-entropy under one normal with correlations.

        .. math:: \tfrac12 \Big((m - \mu)^\top P (m - \mu) + \sum_u \frac{p_u}{1 - p_u} v_u^\top P v_u
            - \log \det \frac{P}{2 \pi}\Big)

        where :math:`v_u` has the means of the weights that unit u masks, and zeros elsewhere.
        """
        assert self._joint is not None
        mean, precision = self._joint
        away = self._layout.flatten(params) - mean
        total = away @ precision @ away - torch.logdet(precision / (2 * torch.pi))
        for site, rate in zip(self.sites, rates, strict=True):
            each = torch.eye(site.units, dtype=mean.dtype, device=mean.device)
            named = {k: params[k].new_zeros(()).expand(site.units, *params[k].shape) for k in self._layout.names}
            for place in site.places:
                named[place.name] = site.on_weight(each, place, params[place.name]) * params[place.name]
            vectors = self._layout.flatten(named)  # (units, D)
            total = total + rate / (1 - rate) * ((vectors @ precision) * vectors).sum()
        return 0.5 * total


def entropy(logit: Tensor) -> Tensor:
    r"""Entropy of one mask in nats, :math:`-p \log p - (1 - p) \log(1 - p)`, from the logit of the rate p."""
    rate = torch.sigmoid(logit)
    return rate * F.softplus(-logit) + (1 - rate) * F.softplus(logit)


def cross_entropy(prior: Prior, loc: Tensor, rate: Tensor | None) -> Tensor:
    """-E_q[log p(w)] of one parameter with mean ``loc``, masked at a rate or not at all."""
    if rate is None:
        return -prior.log_prob(loc).sum()
    kept, dropped = prior.log_prob(loc / (1 - rate)).sum(), prior.log_prob(torch.zeros_like(loc)).sum()
    return -rate * dropped - (1 - rate) * kept


class HalfSquares(torch.autograd.Function):
    """½ Σ_i factor_i ‖value_i‖² in few passes, with its gradient written by hand."""

    @staticmethod
    def forward(ctx, factors: Tensor, *values: Tensor):
        """Add up the squares of all values."""
        squares = torch.stack([torch.linalg.vecdot(flat, flat) for flat in (value.reshape(-1) for value in values)])
        ctx.save_for_backward(factors, squares, *values)
        return 0.5 * (factors @ squares)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Each value times its factor."""
        factors, squares, *values = ctx.saved_tensors
        by_value = torch._foreach_mul(values, (grad * factors).tolist())  # pyright: ignore[reportPrivateImportUsage]
        return 0.5 * grad * squares if ctx.needs_input_grad[0] else None, *by_value


def _centred_precision(prior: Prior | None) -> float | None:
    """The precision of a normal prior of mean 0 with one scale (0 of a flat one), None of any other."""
    mean, precision = (prior.normal_moments() if prior is not None else None) or (None, None)
    return precision if isinstance(mean, float) and isinstance(precision, float) and mean == 0.0 else None


def _log_density_at_zero(prior: Prior | None) -> float:
    return 0.0 if prior is None else prior.log_prob(torch.zeros((), dtype=torch.float64)).item()


def check_priors(model: Model, sites: Sequence[DropoutSite]) -> None:
    """Refuse priors with an infinite density at 0 on weights that are dropped, and priors with learned scales."""
    if model.hyper_names:
        raise Unsupported(
            "Dropout cannot learn the prior's own scale: its ELBO grows without bound as weights and scale shrink "
            "together. Use a method that has a width for every weight, such as MeanFieldVI, or give the prior a fixed "
            "scale."
        )
    start = model.params()
    for site in sites:
        for place in site.places:
            prior = model.prior.prior_of(place.name)
            if prior is not None and not torch.isfinite(prior.log_prob(torch.zeros_like(start[place.name]))).all():
                raise Unsupported(
                    f"Dropout sets weights to 0, where the prior {prior!r} on {place.name!r} has an infinite density. "
                    f"Use a prior that is finite there, such as Normal(1.0), or leave the weight out with where=."
                )
