"""A likelihood's own parameters (a noise) at given weights: their most probable values, and the integral over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.data import Batch, Data
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Params


def most_probable(model: Model, rows: Data, params: Params, buffers: Buffers, names: list[str]) -> Params:
    """The most probable values of the likelihood's own parameters ``names`` at fixed weights."""
    outputs, known = outputs_of(model, rows, params, buffers), in_double(params)

    def log_joint(free: Params) -> Tensor:
        return with_priors(log_likelihood_of(model, outputs, known | free), model, free, known | free)

    return maximise(log_joint, {name: known[name] for name in names}, max_iter=100)


def in_double(params: Params) -> Params:
    """The parameters in double precision."""
    return {name: value.double() for name, value in params.items()}


def outputs_of(model: Model, rows: Data, params: Params, buffers: Buffers) -> list[Batch]:
    """The network's outputs with their targets, and the rows' weights if they have any, in double precision."""
    found = []
    for x, *rest in rows:
        with torch.no_grad():
            output = model.forward(params, x, buffers=buffers)
        found.append(tuple(each.double() if each.is_floating_point() else each for each in (output, *rest)))
    return found


def log_likelihood_of(model: Model, outputs: list[Batch], params: Params) -> Tensor:
    """The log likelihood of outputs with their targets."""
    return torch.stack([model.score(output, y, params, *weights).sum() for output, y, *weights in outputs]).sum()


def with_priors(total: Tensor, model: Model, values: Params, params: Params) -> Tensor:
    """``total`` and the log prior densities of ``values``."""
    for name, value in values.items():
        prior = model.prior.bound(name, params)
        total = total if prior is None else total + prior.log_prob(value).sum()
    return total


def maximise(objective: Callable[[Params], Tensor], start: Params, **settings: Any) -> Params:
    """The values that maximise ``objective``, by L-BFGS."""
    free = {name: value.detach().clone().requires_grad_() for name, value in start.items()}
    optimiser = torch.optim.LBFGS(list(free.values()), line_search_fn="strong_wolfe", **settings)

    def loss() -> Tensor:
        optimiser.zero_grad()
        with torch.enable_grad():
            value = -objective(free)
            value.backward()
        return value

    optimiser.step(loss)
    return {name: value.detach() for name, value in free.items()}


def integral_over(model: Model, name: str, log_density: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, str]:
    r"""The logarithm of an integral over one of the likelihood's parameters, weighted by its prior.

    .. math:: \log \int e^{f(\lambda)} p(\lambda)\, d\lambda \approx f(\hat\lambda) + \log p(\hat\lambda)
        + \tfrac{k}{2} \log 2\pi - \tfrac12 \log\det\big(-\nabla^2 (f + \log p)\big)

    by Laplace's method at the maximum of the integrand.

    Args:
        model: The model.
        name: The parameter.
        log_density: The function f of its value.
        at: Where the integrand is largest.

    Returns:
        The logarithm; or, if there is no such integral, f at that value, and a note that says so.
    """
    prior = model.prior.prior_of(name)

    def integrand(value: Tensor) -> Tensor:
        return with_priors(log_density(value), model, {name: value}, {name: value})

    if prior is not None and prior.proper:
        with torch.enable_grad():
            hessian = torch.autograd.functional.hessian(integrand, at)
        assert isinstance(hessian, Tensor)  # of one input
        factor, failed = torch.linalg.cholesky_ex(-hessian.reshape(at.numel(), at.numel()))
        if not failed:
            volume = 0.5 * at.numel() * math.log(2 * math.pi) - factor.diagonal().log().sum()
            return integrand(at).detach() + volume, ""
    return log_density(at).detach(), f"The log evidence is that at the best {name}, and not integrated over it."
