"""Normal priors in training: at the cost of weight decay, and along the axes of Kronecker factors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import fixed_normal
from knowable.core.model.structured_normal import KroneckerFactored
from knowable.core.network.params import Params, joined_params

# --- the log prior of normals at the cost of weight decay ------------------------------------------------------------


@dataclass(frozen=True)
class NormalPriors:
    """The parameters with a normal (or flat) prior of one mean and one precision that are not learned."""

    names: tuple[str, ...] = ()
    means: tuple[float, ...] = ()
    precisions: tuple[float, ...] = ()
    constant: float = 0.0  # the log density at the means

    @classmethod
    def of(cls, model: Model, params: Params) -> NormalPriors:
        """Those of ``params``; none where a prior is over several parameters together, or learned."""
        priors = {name: None if model.hyper_names else model.prior.prior_of(name) for name in params}
        if any(prior is None for prior in priors.values()):
            return cls()
        found: dict[str, tuple[float, float]] = {}
        constant = 0.0
        for name, prior in priors.items():
            mean, precision = fixed_normal(prior) or (None, None)
            if prior is not None and isinstance(mean, float) and isinstance(precision, float):
                found[name] = mean, precision
                at_mean = prior.log_prob(torch.tensor(mean, dtype=torch.float64))
                constant += params[name].numel() * at_mean.item()
        means, precisions = (tuple(each[place] for each in found.values()) for place in (0, 1))
        return cls(tuple(found), means, precisions, constant)


class NormalLogPrior(torch.autograd.Function):
    """The log prior, and the parameters as they are: the gradient that comes back by them gets the prior's added.

    It is added in place, without a tensor of its own: one pass over the memory, as weight decay takes.
    """

    @staticmethod
    def forward(ctx: Any, priors: NormalPriors, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.priors = priors
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*values)
        flat = [_centred(value.flatten(), mean) for value, mean in zip(values, priors.means, strict=True)]
        terms = [each.dot(each) * (-0.5 * precision) for each, precision in zip(flat, priors.precisions, strict=True)]
        return torch.stack(terms).sum() + priors.constant, *(value.view_as(value) for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if slope is None:
            return None, *gradients
        parts = zip(ctx.saved_tensors, ctx.priors.means, ctx.priors.precisions, strict=True)
        added = [(_centred(value, mean), slope * -precision) for value, mean, precision in parts]
        own = _each_alone(gradients)
        return None, *(
            value * factor if each is None else each.addcmul_(value, factor) if own else each.addcmul(value, factor)
            for each, (value, factor) in zip(gradients, added, strict=True)
        )


# --- coordinates in which a Kronecker-factored prior is independent ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class PriorAxes:
    r"""Weights as deviations from the prior's mean along the axes of its Kronecker factors.

    .. math:: R = V_o^\top (W - M)\, V_i, \qquad -\log p(R) = \tfrac12 \sum_{ij} E_{ij} R_{ij}^2 + \text{const}

    A posterior that is a prior is narrow along some axes and wide along others. An optimiser with a rate for each
    coordinate, as Adam is, needs coordinates along which the prior is independent to find its way. The log joint and
    its mode are the same; the coordinates of a weight matrix and its bias are held in tensors of their shapes.
    """

    normal: KroneckerFactored
    constant: Tensor  # the log density at the mean

    @classmethod
    def of(cls, model: Model) -> PriorAxes | None:
        """Those of the model's prior; None where that is no Kronecker-factored posterior."""
        normal = model.prior.normal if isinstance(model.prior, PosteriorPrior) else None
        if not isinstance(normal, KroneckerFactored):
            return None
        return cls(normal, normal.log_prob(normal.means).detach())

    def coordinates(self, params: Params) -> Params:
        """R, in the place of the weights."""
        away = {name: value - self.normal.means[name] for name, value in params.items() if name in self.normal.means}
        turned = (block.params(block.rotate(block.matrix(away))) for block in self.normal.blocks)
        return {**params, **{name: value.contiguous() for name, value in joined_params(turned).items()}}

    def params(self, values: Params) -> Params:
        """The weights W."""
        turned = joined_params(block.params(block.back(block.matrix(values))) for block in self.normal.blocks)
        return {**values, **{name: self.normal.means[name] + value for name, value in turned.items()}}

    def log_prior(self, values: Params) -> Tensor:
        """The log density of the weights."""
        squares = [(block.matrix(values).square() * block.precision).sum() for block in self.normal.blocks]
        return self.constant - 0.5 * torch.stack(squares).sum()


def _centred(value: Tensor, mean: float) -> Tensor:
    return value if mean == 0.0 else value - mean


def _each_alone(gradients: Iterable[Tensor | None]) -> bool:
    """Whether no two gradients have memory in common: where a sum has two parameters, both get the same tensor."""
    found = [each for each in gradients if each is not None]
    places = {each.untyped_storage().data_ptr() for each in found}
    return len(places) == len(found) and all(each.is_contiguous() for each in found)
