"""Local reparameterisation of a convolution: two convolutions, and as little as possible around them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.randomness import fast_randn

_convolution: Any = torch.ops.aten.convolution
_convolution_backward: Any = torch.ops.aten.convolution_backward


class Geometry(NamedTuple):
    """The arguments of a convolution beside its operands, a number for each dimension."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, rest: dict[str, Any], *, transposed: bool) -> Geometry | None:
        """That of a call with these arguments; None for inputs that are no batch, and padding in words."""
        n = weight.dim() - 2
        if x.dim() != n + 2 or isinstance(rest.get("padding"), str):
            return None
        stride, dilation = (_for_each(rest.get(name, 1), n) for name in ("stride", "dilation"))
        padding, more = (_for_each(rest.get(name, 0), n) for name in ("padding", "output_padding"))
        return cls(stride, padding, dilation, transposed, more, rest.get("groups", 1))


def _for_each(value: Any, n: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * n if len(numbers) == 1 else numbers


class LocalConvolution(torch.autograd.Function):
    """``conv(x, m) + b + sqrt(conv(x², v) + c) ε`` with its gradient written by hand."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        loc: Tensor,
        variance: Tensor,
        bias_loc: Tensor | None,
        bias_variance: Tensor | None,
        geometry: Geometry,
    ):
        """Draw the outputs; the noise is independent for each of them."""
        squares = x * x
        std = _convolution(squares, variance, bias_variance, *geometry).clamp_min_(1e-16).sqrt_()
        noise = _noise_like(std)
        output = _convolution(x, loc, bias_loc, *geometry).addcmul_(std, noise)
        half_slope = noise.div_(std).mul_(0.5)  # d output / d variance of the output
        ctx.geometry = geometry
        ctx.save_for_backward(x, squares, loc, variance, half_slope)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Gradients of inputs, means and variances, those that are asked for."""
        x, squares, loc, variance, half_slope = ctx.saved_tensors
        need_x, need_loc, need_variance, need_bias, need_bias_variance, _ = ctx.needs_input_grad
        spread = grad * half_slope
        by_x, by_loc = _gradients(grad, x, loc, ctx.geometry, need_x, need_loc)
        by_squares, by_variance = _gradients(spread, squares, variance, ctx.geometry, need_x, need_variance)
        channels = (0, *range(2, grad.dim()))  # all dimensions but theirs
        return (
            by_x.addcmul_(by_squares, x, value=2.0) if by_x is not None else None,
            by_loc,
            by_variance,
            grad.sum(channels) if need_bias else None,
            spread.sum(channels) if need_bias_variance else None,
            None,
        )


def _noise_like(std: Tensor) -> Tensor:
    """Standard normal noise in the memory layout of ``std``, whose channels may lie first or last."""
    shape = std.movedim(1, -1).shape if std.stride(1) == 1 else std.shape
    noise = fast_randn(len(std), std[0].numel(), like=std).view(shape)
    return noise.movedim(-1, 1) if std.stride(1) == 1 else noise


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, *wanted: bool) -> tuple[Any, Any]:
    """Of the input and of the weight of one convolution, None where not wanted."""
    by_x, by_weight, _ = _convolution_backward(grad, x, weight, None, *geometry, [*wanted, False])
    return by_x, by_weight
