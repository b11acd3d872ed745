r"""KL(q ‖ p) of a mean-field Gaussian q, by the cheapest way each prior allows.

- Normal and flat priors with fixed values, and others that know how: closed form over contiguous stretches of one flat
  buffer, with a hand-written gradient (:class:`Stretch`).
- Priors with a closed form of their own, or whose scale is being learned: :meth:`Prior.kl_from_normal`, by autograd.
- Everything else: the entropy of q in closed form and :math:`-E_q[\log p(w)]` by Monte Carlo.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.model.prior import Prior
from knowable.core.network.params import Layout, Params
from knowable.inference.variational.family import Drawn

HALF_LOG_TWO_PI_E = 0.5 * math.log(2 * math.pi * math.e)


def entropy_of_normals(log_scale: Tensor) -> Tensor:
    """Entropy of independent normals with these log scales, ``(D,)``."""
    return log_scale.sum() + HALF_LOG_TWO_PI_E * len(log_scale)


@dataclass(frozen=True)
class Stretch(ABC):
    """A contiguous part of the flat buffer under one prior, whose divergence has a gradient written by hand."""

    start: int
    stop: int

    @abstractmethod
    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """The divergence of this stretch, differentiable."""

    def value_and_slopes(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """The divergence, and what it has found out for :meth:`write_gradient` on the way."""
        return self.value(loc, log_scale, scale), None

    @abstractmethod
    def write_gradient(
        self, gradient: Tensor, loc: Tensor, scale: Tensor, weight: float, slopes: Tensor | None = None
    ) -> None:
        """Write ``weight`` times the derivative in ``(loc, log scale)`` into this part of ``gradient`` ``(2, D)``."""

    @abstractmethod
    def joined(self, after: Stretch) -> Stretch | None:
        """This stretch and the one right ``after`` it as one, if they are of the same kind."""


@dataclass(frozen=True)
class NormalStretch(Stretch):
    """A part of the flat buffer under one normal (or flat) prior.

    KL = Σ ½ precision (scale² + (loc - mean)²) - entropy log scale + offset.
    """

    mean: float | Tensor = 0.0
    precision: float | Tensor = 0.0  # 0 for a flat prior
    entropy: float = 0.0  # 1, or 0 for a part whose divergence is computed elsewhere
    offset: float = 0.0  # what does not depend on q

    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """The divergence of this stretch."""
        part = slice(self.start, self.stop)
        centred = self._centred(loc[part])
        if isinstance(self.precision, Tensor):
            quadratic = (self.precision * (scale[part].square() + centred.square())).sum()
        else:
            quadratic = self.precision * (scale[part].dot(scale[part]) + centred.dot(centred))
        return 0.5 * quadratic - self.entropy * log_scale[part].sum() + self.offset

    def cross_entropy(self, loc: Tensor, variance: Tensor) -> Tensor:
        """-E_q[log p] of this stretch for any q with these means and variances of its elements."""
        centred = self._centred(loc)
        return self._cross_entropy(torch.addcmul(variance, centred, centred), 1)

    def sampled_cross_entropy(self, values: Tensor) -> Tensor:
        """The mean of -log p over draws ``(K, stop - start)`` of this stretch."""
        return self._cross_entropy(self._centred(values).square(), len(values))

    def _cross_entropy(self, squares: Tensor, count: int) -> Tensor:
        fixed = not isinstance(self.precision, Tensor)
        quadratic = self.precision * squares.sum() if fixed else (self.precision * squares).sum()
        return (0.5 / count) * quadratic + (self.offset + HALF_LOG_TWO_PI_E * (self.stop - self.start))

    def write_gradient(
        self, gradient: Tensor, loc: Tensor, scale: Tensor, weight: float, slopes: Tensor | None = None
    ) -> None:
        """Write ``weight`` times the derivative in ``(loc, log scale)`` into this part of ``gradient`` ``(2, D)``."""
        part = slice(self.start, self.stop)
        centred, spread = self._centred(loc[part]), scale[part]
        constant = torch.full((), -weight * self.entropy, dtype=loc.dtype, device=loc.device)
        if isinstance(self.precision, Tensor):
            torch.mul(centred, self.precision, out=gradient[0, part]).mul_(weight)
            torch.addcmul(constant, self.precision, spread.square(), value=weight, out=gradient[1, part])
        else:
            torch.mul(centred, weight * self.precision, out=gradient[0, part])
            torch.addcmul(constant, spread, spread, value=weight * self.precision, out=gradient[1, part])

    def joined(self, after: Stretch) -> NormalStretch | None:
        """This stretch and the one right ``after`` it as one, if both have the same numbers as prior."""
        if not isinstance(after, NormalStretch):
            return None
        values = (self.mean, self.precision, after.mean, after.precision)
        if any(isinstance(value, Tensor) for value in values):
            return None
        if (self.mean, self.precision, self.entropy) != (after.mean, after.precision, after.entropy):
            return None
        return replace(after, start=self.start, offset=self.offset + after.offset)

    def _centred(self, loc: Tensor) -> Tensor:
        return loc if isinstance(self.mean, float) and self.mean == 0.0 else loc - self.mean


def fixed_normal(prior: Prior | None) -> tuple[float | Tensor, float | Tensor] | None:
    """Mean and precision of a normal or flat prior whose values are not being learned, else None."""
    return None if prior is None or prior.hyperparams(torch.zeros(())) else prior.normal_moments()


def stretches_of(layout: Layout, model: Model) -> list[NormalStretch]:
    """All of ``layout`` cut into stretches under normal priors (empty ones elsewhere), like neighbours joined."""
    found: list[Any] = []
    for start, size, prior in _places(layout, model):
        _append(found, _stretch(start, start + size, fixed_normal(prior)))
    return found


def closed_stretches_of(layout: Layout, model: Model) -> tuple[list[Stretch], list[str]]:
    """All of ``layout`` cut into stretches, those of priors other than normals too, and the names that have none."""
    found: list[Stretch] = []
    lacking = []
    for name, (start, size, prior) in zip(layout.names, _places(layout, model), strict=True):
        own = None if prior is None else prior.stretch(start, start + size)
        moments = fixed_normal(prior)
        if own is None and moments is None:
            lacking.append(name)
        _append(found, own or _stretch(start, start + size, moments))
    return found, lacking


def _places(layout: Layout, model: Model) -> Iterator[tuple[int, int, Prior | None]]:
    """Where each parameter begins, its size, and its prior."""
    start = 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        yield start, size, model.prior.prior_of(name)
        start += size


def _append(found: list[Stretch], stretch: Stretch) -> None:
    joined = found[-1].joined(stretch) if found else None
    if joined is None:
        found.append(stretch)
    else:
        found[-1] = joined


def _stretch(start: int, stop: int, moments: tuple[float | Tensor, float | Tensor] | None) -> NormalStretch:
    if moments is None:
        return NormalStretch(start, stop)
    mean, precision = moments
    size = stop - start
    if isinstance(mean, Tensor) or isinstance(precision, Tensor):
        mean, precision = (torch.as_tensor(each).flatten().expand(size) for each in (mean, precision))
        return NormalStretch(start, stop, mean, precision, 1.0, -0.5 * (precision.log().sum().item() + size))
    each = -0.5 * (math.log(precision) + 1) if precision > 0 else -HALF_LOG_TWO_PI_E
    return NormalStretch(start, stop, mean, precision, 1.0, each * size)


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


# The prior's side of KL(q ‖ p) for a group of weights: :math:`-E_q[\log p(\theta)]`, by the cheapest way there
# is ------------------------------------------------------------------------------------------------------------------
#
# - Normal and flat priors with fixed values need only means and variances of q, over stretches of the flat vector.
# - Priors with a closed form for normals, or normals whose scale is being learned, need them parameter by parameter.
# - Everything else takes the draws that the likelihood was given.


@dataclass(frozen=True)
class GroupPrior:
    """The priors of the weights of one group.

    Attributes:
        model: The model.
        layout: The weights.
        stretches: All of them, cut where the prior changes.
        others: Those whose prior is not a fixed normal.
    """

    model: Model
    layout: Layout
    stretches: tuple[NormalStretch, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, model: Model, layout: Layout) -> GroupPrior:
        """The priors of the weights of ``layout``."""
        others = tuple(name for name in layout.names if fixed_normal(model.prior.prior_of(name)) is None)
        return cls(model, layout, tuple(stretches_of(layout, model)), others)

    def cross_entropy(self, drawn: Drawn, points: Params, *, normal: bool) -> Tensor:
        """-E_q[log p], in closed form as far as there is one.

        Args:
            drawn: Draws of q and what is known of it.
            points: Point estimates, among them the prior's hyperparameters.
            normal: Whether each weight by itself is normal under q.
        """
        if drawn.moments is None:
            return self.sampled(drawn.values, points)
        means, variances = drawn.moments
        sizes = [stretch.stop - stretch.start for stretch in self.stretches]
        pieces = zip(self.stretches, means.split(sizes), variances.split(sizes), strict=True)
        total = _sum([stretch.cross_entropy(m, v) for stretch, m, v in pieces if stretch.entropy], like=means)
        if not self.others:
            return total
        by_name = self.layout.views(means), self.layout.views(variances), self.layout.views(drawn.values)
        for name in self.others:
            mean, variance, values = (each[name] for each in by_name)
            prior = self._bound(name, points)
            closed = _closed_form(prior, mean, variance, normal=normal)
            total = total + (_sampled(prior, values) if closed is None else closed)
        return total

    def sampled(self, values: Tensor, points: Params) -> Tensor:
        """The mean of -log p over draws ``(K, D)``."""
        pieces = values.split([stretch.stop - stretch.start for stretch in self.stretches], dim=1)
        fixed = [
            stretch.sampled_cross_entropy(piece)
            for stretch, piece in zip(self.stretches, pieces, strict=True)
            if stretch.entropy
        ]
        total = _sum(fixed, like=values)
        views = self.layout.views(values) if self.others else {}
        return total + sum(_sampled(self._bound(name, points), views[name]) for name in self.others)

    def _bound(self, name: str, points: Params) -> Prior:
        prior = self.model.prior.bound(name, points)
        assert prior is not None  # a prior over all parameters as a whole is asked as a whole
        return prior


def _closed_form(prior: Prior, mean: Tensor, variance: Tensor, *, normal: bool) -> Tensor | None:
    """-E[log p] of independent elements with these moments, or None."""
    if normal:
        scale = variance.sqrt()
        kl = prior.kl_from_normal(mean, scale)
        return None if kl is None else kl + scale.log().sum() + HALF_LOG_TWO_PI_E * scale.numel()
    moments = prior.normal_moments()
    if moments is None:
        return None
    spread = moments[1] * variance
    return 0.5 * spread.sum() - prior.log_prob(mean).sum()


def _sampled(prior: Prior, values: Tensor) -> Tensor:
    return -prior.log_prob(values).sum() / len(values)


def _sum(terms: list[Tensor], *, like: Tensor) -> Tensor:
    return torch.stack(terms).sum() if terms else like.new_zeros(())
