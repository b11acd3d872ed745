"""How sharply the prior holds the weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.params import Layout
from knowable.core.posterior_prior import CorrelatedPrior
from knowable.core.prior import Prior
from knowable.core.types import Params
from knowable.inference.laplace.expansion import Expansion


@dataclass(frozen=True)
class PriorPrecision:
    """The precision of the prior over the random weights, in double precision.

    Attributes:
        layout: The random weights.
        by_name: For each its precision: one number, or one for each element. Of a prior with correlations it is the
            diagonal.
        joint: The prior itself, if it has correlations.
        notes: What is not exact about it.
    """

    layout: Layout
    by_name: Params
    joint: CorrelatedPrior | None = None
    notes: tuple[str, ...] = ()

    @property
    def flat(self) -> Tensor:
        """For each weight, ``(D,)``."""
        entries = zip(self.layout.names, self.layout.shapes, strict=True)
        return self.layout.flatten({name: self.by_name[name].expand(shape) for name, shape in entries})

    def dense(self) -> Tensor:
        """As a matrix, ``(D, D)``."""
        joint = None if self.joint is None else self.joint.joint_normal(self.layout)
        return self.flat.diag() if joint is None else joint[1].double()


def prior_precision(expansion: Expansion, settings: Params | None = None) -> PriorPrecision:
    """The prior's precision at the expansion's weights; ``settings`` may hold other values of its hyperparameters."""
    params = {**expansion.params, **(settings or {})}
    layout, prior = expansion.layout, conditional_prior(expansion)
    if isinstance(prior, CorrelatedPrior):
        return PriorPrecision(layout, layout.views(prior.precision_diagonal(layout).double()), prior)
    found, notes = {}, []
    for name in layout.names:
        each = expansion.model.prior.bound(name, params)
        assert each is not None  # the prior factorises
        moments = each.normal_moments()
        if moments is None:
            found[name] = touching_precision(each, params[name].double())
            notes.append(f"{type(each).__name__} is not normal: {name} has the normal that touches it at the mode.")
        else:
            found[name] = torch.as_tensor(moments[1], dtype=torch.float64, device=expansion.model.device)
    return PriorPrecision(layout, found, None, tuple(notes))


def conditional_prior(expansion: Expansion):
    """The model's prior, given the likelihood's parameters where it ties them to the weights."""
    prior = expansion.model.prior
    if not isinstance(prior, CorrelatedPrior):
        return prior
    own = {name: value for name, value in expansion.params.items() if name not in expansion.layout.names}
    return prior.given(own)


def touching_precision(prior: Prior, value: Tensor) -> Tensor:
    r"""The precision of the centred normal with the prior's slope at ``value``: :math:`-\psi'(w) / w`.

    For priors that are scale mixtures of normals (Laplace, Student-t, horseshoe) it is the one that touches the prior's
    density from below (Palmer et al., 2006): never negative, and defined where the density has a kink.
    """
    with torch.enable_grad():
        place = value.detach().requires_grad_()
        (slope,) = torch.autograd.grad(prior.log_prob(place).sum(), place, create_graph=True)
    tiny = torch.finfo(value.dtype).tiny ** 0.5
    return (-slope / torch.where(value.abs() > tiny, value, torch.full_like(value, tiny))).clamp_min(0.0)
