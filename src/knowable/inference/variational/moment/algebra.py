r"""Means, variances and covariances on their way through layers, without sampling: one rule for each operation.

Rows are apart from each other; what is followed are the moments of one row's values. Weights are independent, so that a
linear layer's outputs have exact moments given those of its inputs. Non-linear operations take their inputs to be
normal, which sums of many terms nearly are (Hernández-Lobato and Adams, 2015; Wu et al., 2019).

Covariances between the outputs of a linear layer arise because they share their inputs. They are followed where a layer
is narrow enough. Through an elementwise function f they pass by the Hermite series of two correlated normals,

.. math:: \mathrm{Cov}(f(x), f(y)) = \sum_{n \ge 1} b_n(x)\, b_n(y)\, \rho^n, \qquad
    b_n = \frac{1}{\sqrt{n!}} E[f(m + s z)\, \mathrm{He}_n(z)],

of which four terms are kept. Of a ReLU around zero they have 98.6 % even at a correlation of 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.network.layer_operations import is_transposed
from knowable.inference.variational.moment.activations import (
    LEAST,
    greater_moments,
    rectified_moments,
    rectified_series,
)

NODES, _REACH = 23, 5.5  # of quadrature for smooth functions: half a standard deviation apart
_TERMS = 4  # of the Hermite series


@dataclass(frozen=True)
class Moments:
    """The first moments of random values, a batch of rows.

    Attributes:
        mean: Means, ``(batch, ...)``.
        variance: Variances, of the same shape; None where the values are known.
        covariance: Covariances of each row's values, ``(batch, n, n)`` with the variances on the diagonal; None where
            they are independent, or treated as such.
    """

    mean: Tensor
    variance: Tensor | None = None
    covariance: Tensor | None = None

    @property
    def spread(self) -> Tensor:
        """The variances, zeros where the values are known."""
        return torch.zeros_like(self.mean) if self.variance is None else self.variance

    @property
    def std(self) -> Tensor:
        """Standard deviations, a little above zero."""
        return self.spread.clamp_min(LEAST).sqrt()


# --- linear operations -----------------------------------------------------------------------------------------------


def linear(x: Moments, weight: Moments, bias: Moments | None, *, limit: int) -> Moments:
    r"""A linear layer with independent weights M ± √V, exactly.

    .. math:: E = m M^\top + b, \qquad
        \mathrm{Cov} = M S M^\top + \mathrm{diag}\big(V (m^2 + \mathrm{diag} S) + c\big)

    Args:
        x: Inputs with covariance S, ``(batch, ..., inputs)``.
        weight: ``(outputs, inputs)``.
        bias: ``(outputs,)``, with variance c.
        limit: The largest number of outputs whose covariances are followed.
    """
    mean = F.linear(x.mean, weight.mean, None if bias is None else bias.mean)
    own = _of_the_weights(F.linear, x, weight, bias, {}, like=mean)
    if x.variance is None:
        return Moments(mean, own)
    whole = x.mean.dim() == 2
    if whole and 1 < mean.shape[1] <= limit:
        covariance, variance = linear_covariance(weight.mean, x.variance, x.covariance, own)
        return Moments(mean, variance, covariance)
    if whole and x.covariance is not None:
        handed_on = ((weight.mean @ x.covariance) * weight.mean).sum(-1)
    else:
        handed_on = F.linear(x.variance, weight.mean.square())
    return Moments(mean, handed_on if own is None else handed_on + own)


def convolution(
    op: Callable[..., Tensor], x: Moments, weight: Moments, bias: Moments | None, rest: dict[str, Any]
) -> Moments:
    """A convolution with independent weights: exact variances of independent inputs.

    Positions share weights and inputs, and so are correlated; that is left out.
    """
    mean = op(x.mean, weight.mean, None if bias is None else bias.mean, **rest)
    if x.variance is not None and weight.variance is not None and rest.get("groups", 1) == 1:
        # both sums in one: twice the channels are quicker than two convolutions
        squares = torch.cat([torch.addcmul(x.variance, x.mean, x.mean), x.variance], 1)
        weights = torch.cat([weight.variance, weight.mean.square()], 0 if is_transposed(op) else 1)
        return Moments(mean, op(squares, weights, None if bias is None else bias.variance, **rest))
    own = _of_the_weights(op, x, weight, bias, rest, like=mean)
    if x.variance is None:
        return Moments(mean, own)
    handed_on = op(x.variance, weight.mean.square(), None, **rest)
    return Moments(mean, handed_on if own is None else handed_on + own)


def average(mean: Tensor, variance: Tensor, count: float) -> Moments:
    """A mean over ``count`` independent values, from the averages of means and variances over them."""
    return Moments(mean, variance / count)


def scaled(x: Moments, mean: Tensor, factor: Any) -> Moments:
    """Values multiplied by something known."""
    factor = torch.as_tensor(factor, dtype=mean.dtype, device=mean.device)
    variance = None if x.variance is None else x.variance * factor.square()
    if x.covariance is None:
        return Moments(mean, variance)
    flat = factor.expand(mean.shape).flatten(1)
    return Moments(mean, variance, x.covariance * flat.unsqueeze(1) * flat.unsqueeze(2))


def dropped(x: Moments, rate: float) -> Moments:
    """Dropout in training: each value is zero with probability ``rate``, else divided by 1 - ``rate``."""
    variance = (x.spread + rate * x.mean.square()) / (1.0 - rate)
    return Moments(x.mean, variance, _with_diagonal(x.covariance, variance))


def _of_the_weights(
    op: Callable[..., Tensor], x: Moments, weight: Moments, bias: Moments | None, rest: dict[str, Any], *, like: Tensor
) -> Tensor | None:
    """The variance that the weights themselves bring, which is each output's own."""
    bias_variance = None if bias is None else bias.variance
    if weight.variance is not None:
        squares = x.mean.square() if x.variance is None else torch.addcmul(x.variance, x.mean, x.mean)
        return op(squares, weight.variance, bias_variance, **rest)
    if bias_variance is None:
        return None
    return (bias_variance if op is F.linear else bias_variance.view(-1, *(1,) * (like.dim() - 2))).expand_as(like)


def _with_diagonal(covariance: Tensor | None, variance: Tensor) -> Tensor | None:
    if covariance is None:
        return None
    flat = variance.flatten(1)
    return covariance + (flat - covariance.diagonal(dim1=-2, dim2=-1)).diag_embed()


# --- elementwise functions -------------------------------------------------------------------------------------------


def rectified(x: Moments, slope: float = 0.0) -> Moments:
    r"""ReLU, or leaky ReLU with ``slope`` below zero, of a normal: in closed form.

    With :math:`\alpha = m / s` and :math:`t(\alpha) = \varphi(\alpha) + \alpha \Phi(\alpha)`,

    .. math:: E = s\, t(\alpha), \qquad \mathrm{Var} = s^2 \big(\Phi(\alpha) - t(\alpha)\, t(-\alpha)\big),
        \qquad b = s \Big(\Phi, \frac{\varphi}{\sqrt{2}}, \frac{-\alpha \varphi}{\sqrt{6}},
        \frac{(\alpha^2 - 1) \varphi}{\sqrt{24}}\Big)
    """
    mean, variance = rectified_moments(x.mean, x.spread, slope)
    if x.covariance is None:
        return Moments(mean, variance)
    std = x.std.flatten(1)
    series = rectified_series(x.mean.flatten(1), std, slope)
    return Moments(mean, variance, joined_covariance(x.covariance, std, variance.flatten(1), series))


def smooth(function: Callable[[Tensor], Tensor], x: Moments) -> Moments:
    """Any smooth elementwise function of a normal, by quadrature."""
    nodes, weights = quadrature(x.mean)
    shape = (-1, *(1,) * x.mean.dim())
    values = function(torch.addcmul(x.mean, x.std, nodes.view(shape)))  # (nodes, batch, ...)
    mean = torch.tensordot(weights, values, 1)
    variance = torch.tensordot(weights, (values - mean).square(), 1)
    if x.covariance is None:
        return Moments(mean, variance)
    polynomials = _polynomials(nodes) * weights  # (terms, nodes)
    series = torch.tensordot(polynomials, values, 1).flatten(2)
    return Moments(mean, variance, joined_covariance(x.covariance, x.std.flatten(1), variance.flatten(1), series))


def maximum(x: Moments, y: Moments) -> Moments:
    r"""The greater of two independent normals (Clark, 1961), then treated as normal.

    With :math:`a^2 = v_x + v_y` and :math:`\alpha = (m_x - m_y) / a`,

    .. math:: E = m_y + a\, t(\alpha), \qquad
        \mathrm{Var} = v_x \Phi(\alpha) + v_y \Phi(-\alpha) - a^2\, t(\alpha)\, t(-\alpha)
    """
    return Moments(*greater_moments(x.mean, x.spread, y.mean, y.spread))


def greatest(parts: list[Moments]) -> Moments:
    """The greatest of several, two by two."""
    while len(parts) > 1:
        pairs = [maximum(one, two) for one, two in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def quadrature(like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights with which a weighted sum of f is E[f(z)] for a standard normal z.

    Equally spaced: exponentially accurate for a normal, and where f is steep better than Gauss-Hermite nodes, which are
    farther apart in the middle.
    """
    nodes = torch.linspace(-_REACH, _REACH, NODES, dtype=torch.float64, device=like.device)
    return nodes.to(like.dtype), torch.softmax(-0.5 * nodes.square(), 0).to(like.dtype)


def _polynomials(z: Tensor) -> Tensor:
    """Normalised Hermite polynomials He_n(z) / √n! for n = 1 to 4, ``(4, nodes)``."""
    found, before = [z], torch.ones_like(z)
    for n in range(2, _TERMS + 1):  # He_n = z He_{n-1} - (n - 1) He_{n-2}, divided by √n!
        following = (z * found[-1] - math.sqrt(n - 1) * before) / math.sqrt(n)
        before = found[-1]
        found.append(following)
    return torch.stack(found)


# --- covariances, with gradients written by hand ---------------------------------------------------------------------
#
# They are the largest tensors of a pass: n × n numbers for every row. Here they are stored as ``(n, n, batch)``, rows
# last, whatever their shape. Products over all rows are then a few large ones, everything else runs along contiguous
# memory, and the gradient takes about ten passes where autograd would take thirty.


def linear_covariance(weight: Tensor, variance: Tensor, covariance: Tensor | None, own: Tensor | None) -> Any:
    r"""Covariances :math:`M S M^\top + \mathrm{diag}(o)` of the outputs of a linear layer, and their diagonal.

    Args:
        weight: M, ``(outputs, inputs)``.
        variance: The diagonal of S, ``(batch, inputs)``.
        covariance: S, ``(batch, inputs, inputs)``; None where it is diagonal.
        own: o, ``(batch, outputs)``; None for zeros.

    Returns:
        Covariances ``(batch, outputs, outputs)`` and variances ``(batch, outputs)``.
    """
    with torch.autocast(weight.device.type, enabled=False):
        own = variance.new_zeros(()) if own is None else own.to(weight.dtype)
        own = own.expand(len(variance), len(weight))
        if covariance is not None:
            return _OfCovariances.apply(weight, covariance.to(weight.dtype), own)
        if len(variance) < len(weight):  # products of all pairs of weights are more than those for each row
            return _OfCovariances.apply(weight, variance.to(weight.dtype).diag_embed(), own)
        return _OfVariances.apply(weight, variance.to(weight.dtype), own)


def joined_covariance(covariance: Tensor, std: Tensor, variance: Tensor, series: Tensor) -> Tensor:
    r"""Covariances after an elementwise function, ``(batch, n, n)``, by its Hermite series.

    .. math:: \sum_t b_{ti} b_{tj} \rho_{ij}^t \quad (i \neq j), \qquad \rho_{ij} = \frac{S_{ij}}{s_i s_j}

    Args:
        covariance: S, ``(batch, n, n)``, symmetric.
        std: s, ``(batch, n)``.
        variance: What is on the diagonal, ``(batch, n)``.
        series: b, from the first order on, ``(orders, batch, n)``.
    """
    return _Joined.apply(covariance, std, variance, series)  # type: ignore[no-any-return]


def _rows_last(covariance: Tensor) -> Tensor:
    return covariance.permute(1, 2, 0).contiguous()


def _diagonal(matrices: Tensor) -> Tensor:
    """The diagonals of ``(n, n, batch)``, ``(batch, n)``."""
    return matrices.diagonal(dim1=0, dim2=1)


class _OfVariances(torch.autograd.Function):
    """``M diag(v) M' + diag(o)`` for every row: one product with all pairs of weights, ``M_ik M_jk`` for i ≤ j."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, variance: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        half = _Half.of(len(weight), weight.device)
        pairs = weight.index_select(0, half.rows).mul_(weight.index_select(0, half.columns))
        found = half.whole(pairs @ variance.T)
        _diagonal(found).add_(own)
        ctx.save_for_backward(weight, variance, pairs)
        return found.permute(2, 0, 1), _diagonal(found).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_diagonal: Tensor) -> tuple[Tensor | None, ...]:
        weight, variance, pairs = ctx.saved_tensors
        half = _Half.of(len(weight), weight.device)
        whole = _rows_last(grad)
        on_diagonal = _diagonal(whole) + grad_diagonal
        by_half = half.sums(whole).index_copy_(0, half.diagonal, on_diagonal.T)
        by_pairs = half.whole(by_half @ variance)
        _diagonal(by_pairs).mul_(2.0)
        return by_pairs.mul_(weight).sum(1), by_half.T @ pairs, on_diagonal


@dataclass(frozen=True)
class _Half:
    """The pairs i ≤ j of n numbers."""

    rows: Tensor  # i of each pair
    columns: Tensor  # j
    upper: Tensor  # where the pair i, j is among all n²
    lower: Tensor  # where j, i is
    place: Tensor  # which of the pairs each of the n² is
    diagonal: Tensor  # which of them are i, i

    @staticmethod
    @lru_cache(maxsize=64)
    def of(n: int, device: torch.device) -> _Half:
        """Computed once for every n."""
        rows, columns = torch.triu_indices(n, n, device=device)
        upper, lower = rows * n + columns, columns * n + rows
        place = torch.empty(n * n, dtype=torch.long, device=device)
        place[upper] = place[lower] = torch.arange(len(rows), device=device)
        return _Half(rows, columns, upper, lower, place, place[:: n + 1])

    def whole(self, half: Tensor) -> Tensor:
        """Symmetric matrices ``(n, n, ...)`` from one value for each pair."""
        n = len(self.diagonal)
        return half.index_select(0, self.place).view(n, n, -1)

    def sums(self, matrices: Tensor) -> Tensor:
        """What is at i, j and at j, i of ``(n, n, ...)`` together, for each pair; twice what is on the diagonal."""
        flat = matrices.flatten(0, 1)
        return flat.index_select(0, self.upper).add_(flat.index_select(0, self.lower))


class _OfCovariances(torch.autograd.Function):
    """``M S M' + diag(o)`` for every row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, covariance: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        n, inputs = weight.shape
        inner = _rows_last(covariance)
        half = (weight @ inner.view(inputs, -1)).view(n, inputs, -1)  # M S
        found = weight @ half
        _diagonal(found).add_(own)
        ctx.save_for_backward(weight, inner, half)
        return found.permute(2, 0, 1), _diagonal(found).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_diagonal: Tensor) -> tuple[Tensor | None, ...]:
        weight, inner, half = ctx.saved_tensors
        n, inputs = weight.shape
        whole = grad.permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        _diagonal(whole).add_(grad_diagonal)
        by_half = (weight.T @ whole).view(n, -1)  # (n, inputs · batch)
        by_inner = (weight.T @ by_half).view(inner.shape).permute(2, 0, 1) if ctx.needs_input_grad[1] else None
        by_weight = by_half @ inner.view(inputs, -1).T + (whole @ half.mT).sum(0)
        return by_weight, by_inner, _diagonal(whole)


class _Joined(torch.autograd.Function):
    """Covariances after an elementwise function; see :func:`joined_covariance`."""

    @staticmethod
    def forward(ctx: Any, covariance: Tensor, std: Tensor, variance: Tensor, series: Tensor) -> Tensor:
        series, inverse = series.mT.contiguous(), std.T.reciprocal()  # (orders, n, batch), (n, batch)
        correlation = _rows_last(covariance) * inverse
        correlation.mul_(inverse.unsqueeze(1))
        total = series[-1].unsqueeze(1) * series[-1]
        for each in series[:-1].flip(0):  # Horner's scheme
            total.mul_(correlation).addcmul_(each.unsqueeze(1), each)
        total.mul_(correlation)
        _diagonal(total).copy_(variance)
        ctx.save_for_backward(correlation, inverse, series)
        return total.permute(2, 0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        correlation, inverse, series = ctx.saved_tensors
        grad = _rows_last(grad)
        by_series, space = _by_series(grad, correlation, series)
        # ρ_ij has s_i and s_j below: what a change of ρ does there is known from that of b
        orders = torch.arange(1, len(series) + 1, dtype=inverse.dtype, device=inverse.device).view(-1, 1, 1)
        by_std = (orders * series * by_series).sum(0).mul_(inverse).neg_().T
        slope = _slope(correlation, series, space).mul_(grad).mul_(inverse).mul_(inverse.unsqueeze(1))
        _diagonal(slope).zero_()
        return slope.permute(2, 0, 1), by_std, _diagonal(grad), by_series.mT


def _by_series(grad: Tensor, correlation: Tensor, series: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in b, ``(orders, n, batch)``: sums over j of (g_ij + g_ji) ρ_ij^t b_tj; and memory to use again."""
    power = (grad + grad.transpose(0, 1)).mul_(correlation)
    _diagonal(power).zero_()
    found, product = torch.empty_like(series), torch.empty_like(power)
    for order, each in enumerate(series):
        if order:
            power.mul_(correlation)
        torch.sum(torch.mul(power, each, out=product), 1, out=found[order])
    return found, product


def _slope(correlation: Tensor, series: Tensor, space: Tensor) -> Tensor:
    """The derivative of the series in ρ, ``(n, n, batch)``, in ``space``."""
    order = len(series)
    total = torch.mul((order * series[-1]).unsqueeze(1), series[-1], out=space)
    for each in series[:-1].flip(0):
        order -= 1
        total.mul_(correlation).addcmul_(each.unsqueeze(1), each, value=order)
    return total
