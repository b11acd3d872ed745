"""Products of a network's Jacobian with directions in weight space, without the Jacobian."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from knowable.core.network.params import Params, index_params, number_of_draws
from knowable.inference.laplace.weight_uses import Recorder

Function = Callable[[Params], Tensor]
"""The outputs of some rows as a function of the weights."""


@contextmanager
def differentiable() -> Iterator[None]:
    """Run networks by operations that have every kind of derivative and can be batched."""
    with Recorder(), sdpa_kernel(SDPBackend.MATH):
        yield


def pushed_forward(function: Function, at: Params, directions: Params, *, vectorise: bool) -> Tensor:
    """J times each of a stack of directions: ``(K, rows, ...)``.

    Args:
        function: The outputs of the weights.
        at: The weights.
        directions: K directions, each with a leading dimension K.
        vectorise: All K in one call.
    """

    def one(direction: Params) -> Tensor:
        return jvp(function, (at,), (direction,))[1]

    _prepare()
    with differentiable():
        try:
            if vectorise:
                return vmap(one)(directions)
            return torch.stack([one(index_params(directions, k)) for k in range(number_of_draws(directions))])
        except (RuntimeError, NotImplementedError):  # an operation without a forward derivative
            each = (index_params(directions, k) for k in range(number_of_draws(directions)))
            return torch.stack([_by_two_pullbacks(function, at, direction) for direction in each])


def pulled_back(function: Function, at: Params, cotangent: Tensor) -> Params:
    """Jᵀ times a vector of the shape of the outputs."""
    with torch.enable_grad(), differentiable():
        leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
        output = function(leaves)
        if not output.requires_grad:
            return {name: torch.zeros_like(value) for name, value in at.items()}
        found = torch.autograd.grad(output, list(leaves.values()), cotangent, allow_unused=True)
    pairs = zip(leaves.items(), found, strict=True)
    return {name: torch.zeros_like(leaf) if each is None else each.detach() for (name, leaf), each in pairs}


@cache
def _prepare() -> None:
    """Load what forward derivatives need, once: PyTorch itself warns there of something that it has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def _by_two_pullbacks(function: Function, at: Params, direction: Params) -> Tensor:
    """J v as the derivative of u ↦ Jᵀ u in the direction v."""
    pulled = vjp(function, at)
    again = vjp(lambda u: pulled[1](u)[0], torch.zeros_like(pulled[0]))
    return again[1](direction)[0]
