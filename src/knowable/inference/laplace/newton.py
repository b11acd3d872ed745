"""The last steps to the mode, by Newton's method: for small networks, where the curvature is known as a whole."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.inference.laplace.curvature import FullCurvature, prior_precision
from knowable.inference.laplace.expansion import ExpansionPoint

_SHORTEST = 1e-3  # of a step
_LEAST = 0.2  # of what the slope promises


def polished(expansion: ExpansionPoint, most: int) -> ExpansionPoint:
    """Up to ``most`` damped steps uphill, the last of which is one that promises next to nothing.

    A step is to the top of the parabola: with the generalised Gauss-Newton curvature it is that of Levenberg and
    Marquardt, in which the prior keeps the matrix definite. Where it is Newton's, the digits that are right double with
    each: the last step is the one after which all are. In single precision it is not taken, being rounding error.
    """
    double = expansion.model.dtype == torch.float64
    little = 1e-10 if double else 1e-6  # nats
    for _ in range(most):
        curvature = FullCurvature.of(expansion)
        value, gradient = log_joint_and_gradient(expansion)
        ones = torch.ones(expansion.groups, dtype=torch.float64, device=gradient.device)
        step = curvature.solve(prior_precision(expansion), ones, gradient)
        slope = gradient @ step  # twice what the parabola promises
        last = not 0.5 * slope > little
        if last and not (double and slope > 0):
            break
        higher = _search(expansion, value, step, slope)
        if higher is None:
            break
        expansion = higher
        if last:
            break
    return expansion


def _search(expansion: ExpansionPoint, value: Tensor, step: Tensor, slope: Tensor) -> ExpansionPoint | None:
    """The longest of the step, its half, its quarter, ... that gains a good part of what it should."""
    layout = expansion.layout
    flat = layout.flatten(expansion.params)
    slack = 10 * torch.finfo(flat.dtype).eps * value.abs()
    length = 1.0
    while length > _SHORTEST:
        there = expansion.at(layout.views(flat + (length * step).to(flat)))
        if log_joint(there) >= value + _LEAST * length * slope - slack:
            return there
        length /= 2
    return None


def log_joint(expansion: ExpansionPoint) -> Tensor:
    """Log p(D, θ) of all rows, in double precision."""
    model, params, buffers = expansion.model, expansion.params, expansion.buffers
    with torch.no_grad():
        parts = [model.score(model.forward(params, x, buffers=buffers), y, params) for x, y in expansion.data]
        return torch.cat(parts).double().sum() + model.log_prior(params)


def log_joint_and_gradient(expansion: ExpansionPoint) -> tuple[Tensor, Tensor]:
    """Log p(D, θ) of all rows and its gradient in the random weights, ``(D,)``, in double precision."""
    value, gradient = expansion.log_likelihood()
    with torch.enable_grad():
        flat = expansion.layout.flatten(expansion.params).detach().requires_grad_()
        prior = expansion.model.log_prior({**expansion.params, **expansion.layout.views(flat)})
        if prior.requires_grad:
            gradient = gradient + torch.autograd.grad(prior, flat)[0]
    return value + prior.detach(), gradient
