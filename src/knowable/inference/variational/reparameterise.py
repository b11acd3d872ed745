r"""The fast heart of mean-field inference: draws and divergence of one flat buffer, with a hand-written gradient.

All variational parameters are one tensor ``q`` of shape ``(2, D)``: means and log scales. One call makes the weight
draws :math:`w = m + s \epsilon`, the variances that local reparameterisation needs, and the KL; one backward pass
writes the gradient of all of them into one buffer. Autograd would walk the same memory several times more often.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.network.params import Layout, Params
from knowable.inference.variational.divergence import Stretch


@dataclass(frozen=True)
class Plan:
    """How the buffer is laid out: weights that are drawn first, then those whose layers are sampled locally.

    Attributes:
        drawn: The drawn parameters.
        local: The others.
        stretches: The priors over the buffer, as few stretches as there can be.
    """

    drawn: Layout
    local: Layout
    stretches: tuple[Stretch, ...]

    def named(self, outputs: tuple[Tensor, ...], count: int) -> tuple[Tensor, Params, Params, list[Params]]:
        """The outputs of :class:`DrawAndDivergence` by name: KL, local means, local variances, and each draw."""
        kl, *rest = outputs
        cut = len(self.local.names)
        loc, variance = (dict(zip(self.local.names, rest[i * cut : (i + 1) * cut], strict=True)) for i in (0, 1))
        names = self.drawn.names
        drawn = rest[2 * cut :]
        draws = [dict(zip(names, drawn[k * len(names) : (k + 1) * len(names)], strict=True)) for k in range(count)]
        return kl, loc, variance, draws


class DrawAndDivergence(torch.autograd.Function):
    """The KL, then one output for every parameter: local means, local variances, and the draws.

    One output for each parameter rather than one for all spares the backward pass a copy of the whole gradient.
    """

    @staticmethod
    def forward(ctx, q: Tensor, noise: Tensor, plan: Plan):
        """Compute from ``q`` ``(2, D)`` and standard normal ``noise`` ``(draws, drawn weights)``, which is used up."""
        loc, log_scale = q[0], q[1]
        split = plan.drawn.size
        scale = log_scale.exp()
        shift = noise.mul_(scale[:split])  # s ε: what is added to the mean, and dw / d log s
        variance = scale[split:].square()
        found = [stretch.value_and_slopes(loc, log_scale, scale) for stretch in plan.stretches]
        kl = torch.stack([value for value, _ in found]).sum()
        ctx.plan, ctx.slopes = plan, [slopes for _, slopes in found]
        ctx.save_for_backward(q, scale, shift, variance)
        drawn = [view for each in shift for view in plan.drawn.views(each + loc[:split]).values()]
        return kl, *plan.local.views(loc[split:]).values(), *plan.local.views(variance).values(), *drawn

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_kl: Tensor, *grads: Tensor):
        """Chain rule for all outputs, written into one buffer in as few passes over memory as there can be."""
        q, scale, shift, variance = ctx.saved_tensors
        plan: Plan = ctx.plan
        gradient = torch.empty_like(q)
        weight = grad_kl.item()
        for stretch, slopes in zip(plan.stretches, ctx.slopes, strict=True):
            stretch.write_gradient(gradient, q[0], scale, weight, slopes)
        flat = [grad.reshape(-1) for grad in grads]
        split, cut, sizes = plan.drawn.size, len(plan.local.names), plan.drawn.sizes
        drawn, local = gradient[:, :split], gradient[:, split:]
        if cut:
            _add(local[0], plan.local.sizes, flat[:cut])
            _add(local[1], plan.local.sizes, flat[cut : 2 * cut], variance, value=2.0)  # dv / d log s = 2 v
        for k, moved in enumerate(shift) if sizes else ():
            each = flat[2 * cut + k * len(sizes) : 2 * cut + (k + 1) * len(sizes)]
            _add(drawn[0], sizes, each)
            _add(drawn[1], sizes, each, moved)  # dw / d log s = s ε
        return gradient, None, None


def draw_by_autograd(q: Tensor, noise: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    """What :class:`DrawAndDivergence` gives, with a gradient by autograd: no number is taken out of a tensor.

    For graphs that are recorded, where a compiler joins the passes over memory.
    """
    loc, log_scale = q[0], q[1]
    split = plan.drawn.size
    scale = log_scale.exp()
    variance = scale[split:].square()
    kl = torch.stack([stretch.value(loc, log_scale, scale) for stretch in plan.stretches]).sum()
    drawn = [view for each in noise * scale[:split] for view in plan.drawn.views(each + loc[:split]).values()]
    return (kl, *plan.local.views(loc[split:]).values(), *plan.local.views(variance).values(), *drawn)


def _add(
    target: Tensor, sizes: list[int], parts: list[Tensor], factor: Tensor | None = None, *, value: float = 1.0
) -> None:
    """Add ``parts``, laid end to end (times ``factor`` times ``value``), to ``target``, in place."""
    if factor is None:
        torch._foreach_add_(target.split(sizes), parts)  # pyright: ignore[reportPrivateImportUsage]
    else:
        torch._foreach_addcmul_(  # pyright: ignore[reportPrivateImportUsage]
            target.split(sizes), parts, factor.split(sizes), value=value
        )
