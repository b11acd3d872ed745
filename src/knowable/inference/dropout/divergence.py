r"""The divergence that makes dropout a variational bound.

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
where σ is small beside the weights. And the entropy of the narrow normals is left out: for a fixed σ it is a constant,
which moves nothing, but it means that the bound is known only up to that constant (as σ goes to 0, it goes to minus
infinity). The term is on the scale of the full data, so there is no weight decay to choose: the usual one, in the loss
per example, is :math:`\frac{1}{2 s^2 (1 - p) N}` for the mean weights m, or :math:`\frac{1 - p}{2 s^2 N}` for
:math:`m / (1 - p)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.prior import Prior
from knowable.core.types import Params
from knowable.errors import Unsupported
from knowable.inference.dropout.masks import entropy
from knowable.inference.dropout.site import Site

Rate = float | Tensor


def divergence(model: Model, sites: Sequence[Site], logits: Tensor, params: Params) -> Tensor:
    """KL of the masked weights to the prior, up to the constant of the narrow normals.

    Args:
        model: The model, whose priors these are.
        sites: Where dropout acts.
        logits: Logits of the sites' rates, ``(sites,)``.
        params: Means of all parameters.
    """
    rates = {place.name: rate for site, rate in zip(sites, torch.sigmoid(logits), strict=True) for place in site.places}
    units = torch.tensor([float(site.units) for site in sites], dtype=logits.dtype, device=logits.device)
    return cross_entropy(model, sites, rates, params) - units @ entropy(logits)


def cross_entropy(model: Model, sites: Sequence[Site], rates: Mapping[str, Rate], params: Params) -> Tensor:
    """-E_q[log p(w)] of all random parameters; ``rates`` has those that are masked."""
    layout = Layout.of({name: params[name] for name in model.random_names})
    joint = model.prior.joint_normal(layout)
    if joint is not None:
        return _joint_cross_entropy(layout, *joint, sites, rates, params)
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    for name in model.random_names:
        prior = model.prior.bound(name, params)
        if prior is None:
            raise Unsupported(f"Dropout needs a prior on {name!r} by itself, or one normal over all parameters.")
        total = total + _cross_entropy(prior, params[name], rates.get(name, 0.0))
    return total


def _cross_entropy(prior: Prior, loc: Tensor, rate: Rate) -> Tensor:
    mean, precision = prior.normal_moments() or (None, None)
    if isinstance(mean, float) and isinstance(precision, float) and mean == 0.0:  # the usual prior, or a flat one
        constant = prior.log_prob(torch.zeros((), dtype=torch.float64)).item() * loc.numel()
        return 0.5 * precision * loc.square().sum() / (1 - rate) - constant
    kept = prior.log_prob(loc / (1 - rate)).sum()
    if isinstance(rate, float) and rate == 0.0:
        return -kept
    return -rate * prior.log_prob(torch.zeros_like(loc)).sum() - (1 - rate) * kept


def _joint_cross_entropy(
    layout: Layout, mean: Tensor, precision: Tensor, sites: Sequence[Site], rates: Mapping[str, Rate], params: Params
) -> Tensor:
    r"""The same under one normal with correlations.

    .. math:: \tfrac12 \Big((m - \mu)^\top P (m - \mu) + \sum_u \frac{p_u}{1 - p_u} v_u^\top P v_u
        - \log \det \frac{P}{2 \pi}\Big)

    where :math:`v_u` has the means of the weights that unit u masks, and zeros elsewhere.
    """
    away = layout.flatten(params) - mean
    total = away @ precision @ away - torch.logdet(precision / (2 * torch.pi))
    for site in sites:
        each = torch.eye(site.units, dtype=mean.dtype, device=mean.device)
        named = {name: torch.zeros_like(params[name]).expand(site.units, *params[name].shape) for name in layout.names}
        for place in site.places:
            named[place.name] = site.on_weight(each, place, params[place.name]) * params[place.name]
        rate, vectors = rates[site.name], layout.flatten(named)  # (units, D)
        total = total + rate / (1 - rate) * ((vectors @ precision) * vectors).sum()
    return 0.5 * total


def check_priors(model: Model, sites: Sequence[Site]) -> None:
    """Refuse priors that have no finite density where dropout puts its mass, and scales that would be learned."""
    if model.hyper_names:
        raise Unsupported(
            "Dropout cannot learn the prior's own scale: its bound grows without end as weights and scale shrink "
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
