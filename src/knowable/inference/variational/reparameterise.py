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
    """``(kl, local means, local variances, draw, draw, ...)`` from ``q``.

    The buffer is laid out as drawn weights first, then those whose layers are reparameterised locally.
    """

    @staticmethod
    def forward(ctx, q: Tensor, noise: Tensor, stretches: list[Stretch]):
        """Compute from ``q`` ``(2, D)`` and standard normal ``noise`` ``(draws, drawn weights)``, which is used up."""
        loc, log_scale = q[0], q[1]
        split = noise.shape[1]
        scale = log_scale.exp()
        shift = noise.mul_(scale[:split])  # s ε: what is added to the mean, and dw / d log s
        draws = [each + loc[:split] for each in shift]
        variance = scale[split:].square()
        kl = torch.stack([stretch.value(loc, log_scale, scale) for stretch in stretches]).sum()
        ctx.stretches, ctx.split = stretches, split
        ctx.save_for_backward(q, scale, shift, variance)
        return kl, loc[split:], variance, *draws

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_kl: Tensor, grad_loc: Tensor, grad_variance: Tensor, *grad_draws: Tensor):
        """Chain rule for all outputs, written into one buffer in as few passes over memory as there can be."""
        q, scale, shift, variance = ctx.saved_tensors
        split = ctx.split
        gradient = torch.empty_like(q)
        drawn = grad_draws[0] if len(grad_draws) == 1 else torch.stack(grad_draws).sum(0)
        weight = grad_kl.item()
        for stretch in ctx.stretches:
            source, offset = (drawn, 0) if stretch.start < split else (grad_loc, split)
            by_loc = source[stretch.start - offset : stretch.stop - offset]
            stretch.write_gradient(gradient, by_loc, q[0], scale, weight)
        for each, moved in zip(grad_draws, shift, strict=True):  # dw / d log s = s ε
            gradient[1, :split].addcmul_(each, moved)
        gradient[1, split:].addcmul_(grad_variance, variance, value=2.0)  # dv / d log s = 2 v
        return gradient, None, None
