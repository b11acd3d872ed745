r"""All planar layers of a flow in one go.

A planar layer adds a multiple of one vector: :math:`z_l = z_{l-1} + h_l \hat u_l` with :math:`h_l = \tanh(w_l^\top
z_{l-1} + b_l)`. So the numbers h depend on nothing but inner products of the vectors and of the noise with them,

.. math:: w_l^\top z_{l-1} = w_l^\top \epsilon + \sum_{k<l} h_k\, w_l^\top \hat u_k, \qquad
    z_L = \epsilon + \sum_l h_l \hat u_l,

and the long vectors are read three times in all, and written once with their gradient, whatever the number of layers.
Layer by layer it takes autograd some thirty passes over memory for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.flow_layers import PlanarLayer, above_minus_one

_BLOCK = 8_192  # columns that are written at a time


def through_planes(noise: Tensor, layers: Sequence[PlanarLayer]) -> tuple[Tensor, Tensor]:
    """Images ``(n, D)`` of ``noise`` under all layers, first to last, and the log determinants, ``(n,)``.

    What the layers give one after the other; derivatives are first ones only.
    """
    offsets = torch.stack([layer.offset for layer in layers])
    vectors = [*(layer.direction for layer in layers), *(layer.push for layer in layers)]
    return _Planes.apply(noise, offsets, *vectors)  # type: ignore[no-any-return]


def neighbours(vectors: Sequence[Tensor]) -> Tensor:
    """Vectors of equal length as the rows of one matrix: without a copy where they lie in memory as its rows would."""
    first, size = vectors[0], len(vectors[0])
    storage = first.untyped_storage().data_ptr()
    for number, each in enumerate(vectors):
        together = each.untyped_storage().data_ptr() == storage and each.is_contiguous()
        if not together or each.storage_offset() != first.storage_offset() + number * size:
            return torch.stack(list(vectors))
    return first.as_strided((len(vectors), size), (size, 1))


class _Planes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, noise: Tensor, offsets: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
        rows = neighbours(vectors)
        products = torch.cat([rows @ rows.T, rows @ noise.T], dim=1)
        with torch.enable_grad():
            small = [each.detach().requires_grad_() for each in (products, offsets)]
            found = _coefficients(small[0], small[1], noise.shape[1])
        ctx.small, ctx.found = small, found
        ctx.save_for_backward(noise, *vectors)
        coefficients, log_det = (each.detach() for each in found)
        return torch.addmm(noise, coefficients, rows), log_det

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_det: Tensor) -> tuple[Tensor | None, ...]:
        noise, *vectors = ctx.saved_tensors
        rows = neighbours(vectors)
        slopes = grad @ rows.T, grad_log_det
        by_products, by_offsets = torch.autograd.grad(ctx.found, ctx.small, slopes, retain_graph=True)
        own, with_noise = by_products.split([len(rows), len(noise)], dim=1)
        by_noise = torch.addmm(grad, with_noise.T, rows) if ctx.needs_input_grad[0] else None
        others = torch.cat([noise, grad])
        factors = torch.cat([with_noise, ctx.found[0].detach().T], dim=1)
        return by_noise, by_offsets, *_two_products(own + own.T, rows, factors, others).unbind()


def _two_products(one: Tensor, rows: Tensor, other: Tensor, others: Tensor) -> Tensor:
    """``one @ rows + other @ others``, written in blocks that stay in the cache between the two."""
    found = rows.new_empty((len(one), rows.shape[1]))
    for first in range(0, rows.shape[1], _BLOCK):
        block = slice(first, first + _BLOCK)
        torch.mm(one, rows[:, block], out=found[:, block]).addmm_(other, others[:, block])
    return found


def _coefficients(products: Tensor, offsets: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What is added of each vector, ``(n, 2 L)``, and the log determinants, ``(n,)``.

    Args:
        products: Inner products of the 2 L vectors, √D w and then u, with each other and with n rows of noise,
            ``(2 L, 2 L + n)``.
        offsets: b, ``(L,)``.
        size: D.
    """
    layers = len(offsets)
    root = math.sqrt(size)
    squares = products[:layers, :layers] / size  # w · w
    mixed = products[:layers, layers : 2 * layers] / root  # w · u
    free = mixed.diagonal()
    along = above_minus_one(free)
    bent = (along - free) / squares.diagonal().clamp_min(1e-12)  # û = u + bent w
    across = torch.addcmul(mixed, squares, bent)  # w_l · û_k
    reach = (products[:layers, 2 * layers :] / root).T + offsets  # (n, L)
    bends: list[Tensor] = []
    for layer in range(layers):
        before = torch.stack(bends, 1) @ across[layer, :layer] if bends else 0.0
        bends.append(torch.tanh(reach[:, layer] + before))
    bend = torch.stack(bends, 1)  # h, (n, L)
    log_det = torch.log1p((1.0 - bend.square()) * along).sum(1)
    return torch.cat([bend * bent / root, bend], dim=1), log_det
