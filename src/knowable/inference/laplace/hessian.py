"""Second derivatives of a function of one flat vector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_COLUMNS = 64  # computed together


def hessian(function: Callable[..., Tensor], flat: Tensor, *data: Tensor) -> Tensor:
    """The matrix of second derivatives at ``flat`` ``(D,)``: ``(D, D)``, symmetric, in double precision."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
        flat = flat.detach().clone().requires_grad_()
        value = function(flat, *data)
        if not value.requires_grad:
            return torch.zeros((len(flat), len(flat)), dtype=torch.float64, device=flat.device)
        (gradient,) = torch.autograd.grad(value, flat, create_graph=True)
        if not gradient.requires_grad:
            return torch.zeros((len(flat), len(flat)), dtype=torch.float64, device=flat.device)
        rows = torch.eye(len(flat), dtype=flat.dtype, device=flat.device).split(_COLUMNS)
        found = torch.cat([_products(gradient, flat, some) for some in rows]).double()
    return 0.5 * (found + found.T)


def _products(gradient: Tensor, flat: Tensor, directions: Tensor) -> Tensor:
    """Hessian times each of ``directions`` ``(k, D)``."""
    try:
        (found,) = torch.autograd.grad(
            gradient, flat, directions, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
    except RuntimeError:  # an operation that cannot be batched
        each = [torch.autograd.grad(gradient, flat, v, retain_graph=True, allow_unused=True)[0] for v in directions]
        found = None if each[0] is None else torch.stack(each)
    return torch.zeros_like(directions) if found is None else found.detach()
