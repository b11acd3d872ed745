r"""The fast heart of mean-field inference: draws and divergence of one flat buffer, with a hand-written gradient.

All variational parameters are one tensor ``q`` of shape ``(2, D)``: means and log scales. One call makes the weight
draws :math:`w = m + s \epsilon`, the variances that local reparameterisation needs, and the KL; one backward pass
writes the gradient of all of them into one buffer. Autograd would walk the same memory several times more often.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.inference.variational.divergence import Stretch


class DrawAndDivergence(torch.autograd.Function):
    """``(drawn, local means, local variances, kl)`` from ``q``.

    The buffer is laid out as drawn weights first, then those whose layers are reparameterised locally.
    """

    @staticmethod
    def forward(ctx, q: Tensor, noise: Tensor, stretches: list[Stretch]):
        """Compute from ``q`` ``(2, D)`` and standard normal ``noise`` ``(draws, drawn weights)``, which is used up."""
        loc, log_scale = q[0], q[1]
        split = noise.shape[1]
        scale = log_scale.exp()
        shift = noise.mul_(scale[:split])  # s ε: what is added to the mean, and dw / d log s
        drawn = shift + loc[:split]
        variance = scale[split:].square()
        kl = _total(stretches, loc, log_scale, scale)
        ctx.stretches, ctx.split = stretches, split
        ctx.save_for_backward(q, scale, shift, variance)
        return drawn, loc[split:], variance, kl

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_drawn: Tensor, grad_loc: Tensor, grad_variance: Tensor, grad_kl: Tensor):
        """Chain rule for all four outputs, written into one buffer."""
        q, scale, shift, variance = ctx.saved_tensors
        split = ctx.split
        gradient = torch.empty_like(q)
        if shift.shape[0] == 1:
            gradient[0, :split] = grad_drawn[0]
            torch.mul(grad_drawn[0], shift[0], out=gradient[1, :split])
        else:
            torch.sum(grad_drawn, 0, out=gradient[0, :split])
            torch.sum(grad_drawn * shift, 0, out=gradient[1, :split])
        gradient[0, split:] = grad_loc
        torch.mul(grad_variance, variance, out=gradient[1, split:]).mul_(2.0)  # dv / d log s = 2 v
        weight = grad_kl.item()
        for stretch in ctx.stretches:
            stretch.add_gradient(gradient, q[0], scale, weight)
        return gradient, None, None


def _total(stretches: list[Stretch], loc: Tensor, log_scale: Tensor, scale: Tensor) -> Tensor:
    total = torch.zeros((), dtype=loc.dtype, device=loc.device)
    for stretch in stretches:
        total = total + stretch.value(loc, log_scale, scale)
    return total
