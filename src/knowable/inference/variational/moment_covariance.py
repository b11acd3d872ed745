r"""Covariances of a row's values through linear layers and elementwise functions, with gradients written by hand.

They are the largest tensors of a pass: n × n numbers for every row. Here they lie in memory as ``(n, n, batch)``, rows
last, whatever their shape says. Then products over all rows are a few large ones, everything else runs along whole
stretches of memory, and the gradient needs some ten passes where autograd would take three times as many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
    """The pairs i ≤ j of n numbers.

    Attributes:
        rows: i of each pair.
        columns: j.
        upper: Where the pair i, j is among all n².
        lower: Where j, i is.
        place: Which of the pairs each of the n² is.
        diagonal: Which of them are i, i.
    """

    rows: Tensor
    columns: Tensor
    upper: Tensor
    lower: Tensor
    place: Tensor
    diagonal: Tensor

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
