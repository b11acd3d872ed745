"""The last steps to the mode, by Newton's method: for small networks, with the full curvature matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.inference.laplace.curvature import FullCurvature, prior_precision
from knowable.inference.laplace.expansion import ExpansionPoint

_SHORTEST_STEP = 1e-3  # as a fraction of the Newton step
_ARMIJO = 0.2  # the least gain, as a fraction of what the gradient promises


def polished(expansion: ExpansionPoint, most: int) -> ExpansionPoint:
    """The point after up to ``most`` damped Newton steps that increase the log joint.

    With the generalised Gauss-Newton curvature they are Levenberg-Marquardt steps, in which the prior keeps the matrix
    positive definite. Newton's method converges quadratically: one more step after the gain has become negligible makes
    all digits right. In single precision that step is rounding error, and not taken.
    """
    double = expansion.model.dtype == torch.float64
    little = 1e-10 if double else 1e-6  # nats
    for _ in range(most):
        curvature = FullCurvature.of(expansion)
        value, gradient = log_joint_and_gradient(expansion)
        ones = torch.ones(expansion.groups, dtype=torch.float64, device=gradient.device)
        step = curvature.solve(prior_precision(expansion), ones, gradient)
        slope = gradient @ step  # twice the gain that the quadratic approximation promises
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
    """Backtracking line search: the longest of the step, its half, its quarter, ... with enough gain (Armijo)."""
    layout = expansion.layout
    flat = layout.flatten(expansion.params)
    slack = 10 * torch.finfo(flat.dtype).eps * value.abs()
    length = 1.0
    while length > _SHORTEST_STEP:
        there = expansion.at(layout.views(flat + (length * step).to(flat)))
        if log_joint(there) >= value + _ARMIJO * length * slope - slack:
            return there
        length /= 2
    return None


def log_joint(expansion: ExpansionPoint) -> Tensor:
    """The log joint log p(D, θ) of all rows, in double precision."""
    model, params, buffers = expansion.model, expansion.params, expansion.buffers
    with torch.no_grad():
        parts = [model.score(model.forward(params, x, buffers=buffers), y, params) for x, y in expansion.data]
        return torch.cat(parts).double().sum() + model.log_prior(params)


def log_joint_and_gradient(expansion: ExpansionPoint) -> tuple[Tensor, Tensor]:
    """The log joint log p(D, θ) and its gradient in the random weights, ``(D,)``, in double precision."""
    value, gradient = expansion.log_likelihood()
    with torch.enable_grad():
        flat = expansion.layout.flatten(expansion.params).detach().requires_grad_()
        prior = expansion.model.log_prior({**expansion.params, **expansion.layout.views(flat)})
        if prior.requires_grad:
            gradient = gradient + torch.autograd.grad(prior, flat)[0]
    return value + prior.detach(), gradient
