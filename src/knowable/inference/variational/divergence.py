r"""KL(q ‖ p) of a mean-field Gaussian q, by the cheapest way each prior allows.

- Normal and flat priors with fixed values: closed form over contiguous stretches of one flat buffer, with a
  hand-written gradient (:class:`Stretch`).
- Priors with a closed form of their own, or whose scale is being learned: :meth:`Prior.kl_from_normal`, by autograd.
- Everything else: the entropy of q in closed form and :math:`-E_q[\log p(w)]` by Monte Carlo.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.prior import Prior
from knowable.core.types import Params

HALF_LOG_TWO_PI_E = 0.5 * math.log(2 * math.pi * math.e)


@dataclass(frozen=True)
class Stretch:
    """A contiguous part of the flat buffer under one normal (or flat) prior.

    KL = Σ ½ precision (scale² + (loc - mean)²) - log scale + offset.
    """

    start: int
    stop: int
    mean: float | Tensor
    precision: float | Tensor  # 0 for a flat prior
    offset: float  # what does not depend on q

    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """The divergence of this stretch."""
        part = slice(self.start, self.stop)
        centred = self._centred(loc[part])
        if isinstance(self.precision, Tensor):
            quadratic = (self.precision * (scale[part].square() + centred.square())).sum()
        else:
            quadratic = self.precision * (scale[part].dot(scale[part]) + centred.dot(centred))
        return 0.5 * quadratic - log_scale[part].sum() + self.offset

    def add_gradient(self, gradient: Tensor, loc: Tensor, scale: Tensor, weight: float) -> None:
        """Add ``weight`` times the derivative in ``(loc, log scale)`` to ``gradient`` ``(2, D)``, in place."""
        part = slice(self.start, self.stop)
        if isinstance(self.precision, Tensor):
            gradient[0, part].addcmul_(self._centred(loc[part]), self.precision, value=weight)
            gradient[1, part].add_(self.precision * scale[part].square() - 1, alpha=weight)
        else:
            gradient[0, part].add_(self._centred(loc[part]), alpha=weight * self.precision)
            gradient[1, part].addcmul_(scale[part], scale[part], value=weight * self.precision).sub_(weight)

    def _centred(self, loc: Tensor) -> Tensor:
        return loc if isinstance(self.mean, float) and self.mean == 0.0 else loc - self.mean


def fixed_normal(prior: Prior | None) -> tuple[float | Tensor, float | Tensor] | None:
    """Mean and precision of a normal or flat prior whose values are not being learned, else None."""
    return None if prior is None or prior.hyperparams(torch.zeros(())) else prior.normal_moments()


def stretches_of(layout: Layout, model: Model) -> list[Stretch]:
    """The parts of ``layout`` under fixed normal or flat priors; neighbours with the same prior are joined."""
    found: list[Stretch] = []
    start = 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        moments = fixed_normal(model.prior.prior_of(name))
        if moments is not None:
            _extend(found, start, start + size, *moments)
        start += size
    return found


def _extend(found: list[Stretch], start: int, stop: int, mean: float | Tensor, precision: float | Tensor) -> None:
    if isinstance(mean, Tensor) or isinstance(precision, Tensor):
        mean, precision = (torch.as_tensor(each).flatten().expand(stop - start) for each in (mean, precision))
        offset = -0.5 * (precision.log().sum().item() + (stop - start))
        found.append(Stretch(start, stop, mean, precision, offset))
        return
    last = found[-1] if found else None
    if last is not None and last.stop == start and (last.mean, last.precision) == (mean, precision):
        start = found.pop().start
    each = -0.5 * (math.log(precision) + 1) if precision > 0 else -HALF_LOG_TWO_PI_E
    found.append(Stretch(start, stop, mean, precision, each * (stop - start)))


def other_divergence(model: Model, names: list[str], loc: Params, scale: Params, params: Params, draws: int) -> Tensor:
    """KL of the parameters that no stretch covers.

    Args:
        model: The model, whose priors these are.
        names: The parameters.
        loc: Means of q.
        scale: Standard deviations of q.
        params: Point estimates, among them the prior's hyperparameters.
        draws: Monte Carlo draws where there is no closed form.
    """
    joint = model.prior.joint_kl(loc, scale) if names else None
    if joint is not None:
        return joint
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    for name in names:
        prior = model.prior.bound(name, params)
        assert prior is not None  # a prior over all parameters as a whole has a joint divergence
        closed = prior.kl_from_normal(loc[name], scale[name])
        total = total + (monte_carlo_divergence(prior, loc[name], scale[name], draws) if closed is None else closed)
    return total


def monte_carlo_divergence(prior: Prior, loc: Tensor, scale: Tensor, draws: int) -> Tensor:
    """-H(q) in closed form minus E_q[log p(w)] by reparameterised draws."""
    noise = torch.randn((draws, *loc.shape), dtype=loc.dtype, device=loc.device)
    cross = -prior.log_prob(loc + scale * noise).sum() / draws
    return cross - scale.log().sum() - HALF_LOG_TWO_PI_E * loc.numel()
