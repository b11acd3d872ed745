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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.layer_operations import is_transposed
from knowable.inference.variational.moment_activations import (
    LEAST,
    greater_moments,
    rectified_moments,
    rectified_series,
)
from knowable.inference.variational.moment_covariance import joined_covariance, linear_covariance

NODES, _REACH = 23, 5.5  # of quadrature for smooth functions: half a standard deviation apart
_TERMS = 4  # of the Hermite series


@dataclass(frozen=True)
class Moments:
    """The first moments of random values, a batch of rows.

    Attributes:
        mean: Means, ``(batch, ...)``.
        variance: Variances, of the same shape; None where the values are known.
        covariance: Covariances of each row's values, ``(batch, n, n)`` with the variances on the diagonal; None where
            they are independent, or taken to be.
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


# --- the greater of two ----------------------------------------------------------------------------------------------


def maximum(x: Moments, y: Moments) -> Moments:
    r"""The greater of two independent normals (Clark, 1961), taken to be normal afterwards.

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


# --- quadrature ------------------------------------------------------------------------------------------------------


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
