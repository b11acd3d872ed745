r"""KL(q ‖ p) of a mean-field Gaussian q, by the cheapest way each prior allows.

- Normal, flat and log-uniform priors with fixed values: closed form over contiguous segments of one flat vector of
  means and log scales, with a hand-written gradient (:class:`PriorSegment`).
- Other priors with a closed form, or whose scale is learned: :meth:`Prior.kl_from_normal`, by autograd.
- Everything else: the entropy of q in closed form and :math:`-E_q[\log p(w)]` by Monte Carlo.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.model.prior import Prior, fixed_normal
from knowable.core.network.params import Layout, Params
from knowable.errors import Unsupported
from knowable.priors.log_uniform import K1, K2, K3, LogUniform

HALF_LOG_TWO_PI_E = 0.5 * math.log(2 * math.pi * math.e)


def entropy_of_normals(log_scale: Tensor) -> Tensor:
    """Entropy of independent normals with these log scales, ``(D,)``."""
    return log_scale.sum() + HALF_LOG_TWO_PI_E * len(log_scale)


@dataclass(frozen=True)
class PriorSegment(ABC):
    """Elements ``start`` to ``stop`` of the flat vectors, under one prior whose KL has a hand-written gradient.

    Every method takes the whole vectors ``loc``, ``log_scale`` and ``scale`` ``(D,)`` and reads its own part.
    """

    start: int
    stop: int

    @abstractmethod
    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """KL of this segment, differentiable."""

    def value_and_slopes(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
        """The KL, and intermediate values that :meth:`write_gradient` can use again."""
        return self.value(loc, log_scale, scale), None

    @abstractmethod
    def write_gradient(
        self, gradient: Tensor, loc: Tensor, scale: Tensor, weight: float, slopes: Tensor | None = None
    ) -> None:
        """Write ``weight`` times the derivative in ``(loc, log scale)`` into this part of ``gradient`` ``(2, D)``."""

    @abstractmethod
    def joined(self, after: PriorSegment) -> PriorSegment | None:
        """This segment and its right neighbour as one, or None if their priors differ."""


@dataclass(frozen=True)
class NormalSegment(PriorSegment):
    """A segment under one normal (or flat) prior.

    KL = Σ ½ precision (scale² + (loc - mean)²) - entropy log scale + offset.

    Attributes:
        mean: Mean of the prior.
        precision: Precision of the prior; 0 for a flat prior.
        entropy: 1, or 0 for an empty segment, whose KL is computed elsewhere.
        offset: What does not depend on q.
    """

    mean: float | Tensor = 0.0
    precision: float | Tensor = 0.0
    entropy: float = 0.0
    offset: float = 0.0

    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """KL of this segment."""
        part = slice(self.start, self.stop)
        centred = self._centred(loc[part])
        if isinstance(self.precision, Tensor):
            quadratic = (self.precision * (scale[part].square() + centred.square())).sum()
        else:
            quadratic = self.precision * (scale[part].dot(scale[part]) + centred.dot(centred))
        return 0.5 * quadratic - self.entropy * log_scale[part].sum() + self.offset

    def cross_entropy(self, loc: Tensor, variance: Tensor) -> Tensor:
        """-E_q[log p] of this segment for any q with these means and variances of its elements."""
        centred = self._centred(loc)
        return self._cross_entropy(torch.addcmul(variance, centred, centred), 1)

    def sampled_cross_entropy(self, values: Tensor) -> Tensor:
        """The mean of -log p over draws ``(K, stop - start)`` of this segment."""
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

    def joined(self, after: PriorSegment) -> NormalSegment | None:
        """This segment and its right neighbour as one, if both have the same prior."""
        if not isinstance(after, NormalSegment):
            return None
        values = (self.mean, self.precision, after.mean, after.precision)
        if any(isinstance(value, Tensor) for value in values):
            return None
        if (self.mean, self.precision, self.entropy) != (after.mean, after.precision, after.entropy):
            return None
        return replace(after, start=self.start, offset=self.offset + after.offset)

    def _centred(self, loc: Tensor) -> Tensor:
        return loc if isinstance(self.mean, float) and self.mean == 0.0 else loc - self.mean


@dataclass(frozen=True)
class LogUniformSegment(PriorSegment):
    r"""A segment under the log-uniform prior.

    With :math:`t = \log \alpha^{-1} = 2 \log |m| - 2 \log s` and :math:`\sigma_t = \sigma(k_3 t - k_2)` the slope is

    .. math:: \frac{d\, \mathrm{KL}}{dt} = k_1 k_3\, \sigma_t (1 - \sigma_t) + \frac{1}{2} \frac{1}{1 + \alpha},
        \qquad \frac{dt}{dm} = \frac{2}{m}, \quad \frac{dt}{d \log s} = -2

    and 0 at a mean of 0. The hand-written value is clamped where :math:`1/\alpha` overflows.
    """

    def value(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
        """KL of this segment, differentiable."""
        return LogUniform().kl_from_normal(loc[self.start : self.stop], scale[self.start : self.stop])

    def value_and_slopes(self, loc: Tensor, log_scale: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The KL, and its derivative in t divided by k1 k3."""
        part = slice(self.start, self.stop)
        inverse = (loc[part] / scale[part]).square_().clamp_max_(0.1 * torch.finfo(loc.dtype).max)  # 1/alpha
        bulk = torch.add(loc.new_tensor(-K2), inverse.log(), alpha=K3).sigmoid_()  # 0 where the mean is 0
        total = K1 * bulk.sum() + 0.5 * inverse.log1p().sum()
        slopes = bulk.addcmul_(bulk, bulk, value=-1.0)
        return total, slopes.addcdiv_(inverse, inverse + 1.0, value=0.5 / (K1 * K3))

    def write_gradient(
        self, gradient: Tensor, loc: Tensor, scale: Tensor, weight: float, slopes: Tensor | None = None
    ) -> None:
        """Write ``weight`` times the derivative in ``(loc, log scale)`` into this part of ``gradient`` ``(2, D)``."""
        part = slice(self.start, self.stop)
        if slopes is None:
            slopes = self.value_and_slopes(loc, scale, scale)[1]
        by_loc, by_log_scale = gradient[0, part], gradient[1, part]
        torch.mul(slopes, -2.0 * weight * K1 * K3, out=by_log_scale)
        torch.div(by_log_scale, loc[part], out=by_loc).neg_().nan_to_num_(nan=0.0)  # 0 / 0 where the mean is 0

    def joined(self, after: PriorSegment) -> LogUniformSegment | None:
        """This segment and its right neighbour as one."""
        return LogUniformSegment(self.start, after.stop) if isinstance(after, LogUniformSegment) else None


FAST_KL: dict[type[Prior], Callable[[int, int], PriorSegment]] = {LogUniform: LogUniformSegment}
"""Priors other than normals whose KL over a segment is written by hand."""


def prior_segments(
    layout: Layout, model: Model, *, names: Collection[str] | None = None, normal_only: bool = False
) -> tuple[list[Any], list[str]]:
    """Cut the flat vector of ``layout`` into segments with one prior each.

    Args:
        layout: Names and shapes in the order of the vector.
        model: The model, whose priors these are.
        names: The parameters whose KL is wanted; None for all. The others get empty segments.
        normal_only: Use only :class:`NormalSegment`, not the fast KL of other priors.

    Returns:
        The segments, equal neighbours joined, and the names whose prior has no segment (theirs are empty).
    """
    segments: list[PriorSegment] = []
    lacking, start = [], 0
    for name, size in zip(layout.names, layout.sizes, strict=True):
        segment: PriorSegment = NormalSegment(start, start + size)  # empty
        if names is None or name in names:
            found = _segment(model.prior.prior_of(name), start, start + size, normal_only=normal_only)
            if found is None:
                lacking.append(name)
            segment = found or segment
        joined = segments[-1].joined(segment) if segments else None
        if joined is not None:
            segments.pop()
        segments.append(joined or segment)
        start += size
    return segments, lacking


def _segment(prior: Prior | None, start: int, stop: int, *, normal_only: bool) -> PriorSegment | None:
    """The segment of a prior, or None where there is none."""
    fast = None if prior is None or normal_only else FAST_KL.get(type(prior))
    if fast is not None:
        return fast(start, stop)
    moments = fixed_normal(prior)
    if moments is None:
        return None
    mean, precision = moments
    size = stop - start
    if isinstance(mean, Tensor) or isinstance(precision, Tensor):
        mean, precision = (torch.as_tensor(each).flatten().expand(size) for each in (mean, precision))
        return NormalSegment(start, stop, mean, precision, 1.0, -0.5 * (precision.log().sum().item() + size))
    each = -0.5 * (math.log(precision) + 1) if precision > 0 else -HALF_LOG_TWO_PI_E
    return NormalSegment(start, stop, mean, precision, 1.0, each * size)


def remaining_kl(model: Model, names: Sequence[str], loc: Params, scale: Params, params: Params, draws: int) -> Tensor:
    """KL of the parameters whose prior has no segment: by a closed form with autograd, else by Monte Carlo."""
    joint = model.prior.joint_kl(loc, scale) if names else None
    if joint is not None:
        return joint
    total = torch.zeros((), dtype=model.dtype, device=model.device)
    for name in names:
        prior = model.prior.bound(name, params)
        if prior is None:
            raise Unsupported(
                f"{type(model.prior).__name__} is a prior of weights and noise together, for which there is no KL of "
                f"independent weights here. Use ExactLinear, FullRankVI or NUTS, or a Normal prior."
            )
        closed = prior.kl_from_normal(loc[name], scale[name])
        total = total + (monte_carlo_kl(prior, loc[name], scale[name], draws) if closed is None else closed)
    return total


def monte_carlo_kl(prior: Prior, loc: Tensor, scale: Tensor, draws: int) -> Tensor:
    """-H(q) in closed form minus E_q[log p(w)] by reparameterised draws."""
    noise = torch.randn((draws, *loc.shape), dtype=loc.dtype, device=loc.device)
    cross = -prior.log_prob(loc + scale * noise).sum() / draws
    return cross - scale.log().sum() - HALF_LOG_TWO_PI_E * loc.numel()
