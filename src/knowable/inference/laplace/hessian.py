"""Second derivatives of a function of one flat vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from knowable.core.network.batched import batched

_COLUMNS = 64  # computed together


def hessian(function: Callable[..., Tensor], flat: Tensor, *data: Tensor) -> Tensor:
    """The matrix of second derivatives at ``flat`` ``(D,)``: ``(D, D)``, symmetric, in double precision."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
        flat = flat.detach().clone().requires_grad_()
        gradient = value = function(flat, *data)
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, flat, create_graph=True)
        if not gradient.requires_grad:
            return torch.zeros((len(flat), len(flat)), dtype=torch.float64, device=flat.device)

        def products(directions: Tensor, together: bool = True) -> Tensor:
            (found,) = torch.autograd.grad(
                gradient, flat, directions, retain_graph=True, is_grads_batched=together, allow_unused=True
            )
            return torch.zeros_like(directions) if found is None else found.detach()

        rows = torch.eye(len(flat), dtype=flat.dtype, device=flat.device).split(_COLUMNS)
        call = batched(products, lambda some: torch.stack([products(each, together=False) for each in some]))
        found = torch.cat([call(some) for some in rows]).double()
    return 0.5 * (found + found.T)
