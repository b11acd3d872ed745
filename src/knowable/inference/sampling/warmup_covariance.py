r"""The shape of a density, learned in the warm-up as a factor L of its covariance :math:`\Sigma = L L^\top`.

Chains come in groups of equal size that lie one after the other (the rungs of a ladder of temperatures; or one group),
and every group learns its own shape: a vector of standard deviations (diagonal) or a lower triangle (dense). In the end
it is estimated from the spread *within* each chain, pooled over the chains of a group, so that chains in different
modes do not inflate it. Early on the spread *between* chains counts as well: they begin further apart than a chain
walks while its steps are short. Windows begin short and each is a third longer than the one before: a direction whose
steps are much too short widens in every window, so that many short windows find scales that few long ones do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.chains.kernel import State
from knowable.inference.sampling import window

KINDS = ("auto", "dense", "diagonal")
DENSE_UP_TO = 200  # dimensions


def is_dense(kind: str, dimension: int) -> bool:
    """Whether ``kind`` means a whole covariance in so many dimensions."""
    return kind == "dense" or (kind == "auto" and dimension <= DENSE_UP_TO)


def initial(groups: int, like: Tensor, *, dense: bool) -> Tensor:
    """The identity for every group, ``(G, D, D)`` or ``(G, D)``."""
    ones = torch.ones(groups, like.shape[1], dtype=like.dtype, device=like.device)
    return torch.diag_embed(ones) if dense else ones


def apply(factor: Tensor, vectors: Tensor) -> Tensor:
    """L z for every chain of every group, ``(..., G C, D)``."""
    grouped = vectors.unflatten(-2, (len(factor), -1))
    if factor.dim() == 2:
        return (grouped * factor.unsqueeze(1)).flatten(-3, -2)
    return (grouped @ factor.mT).flatten(-3, -2)


def apply_transposed(factor: Tensor, vectors: Tensor) -> Tensor:
    """Lᵀ g for every chain of every group, ``(G C, D)``."""
    if factor.dim() == 2:
        return apply(factor, vectors)
    return (vectors.unflatten(0, (len(factor), -1)) @ factor).flatten(0, 1)


# --- learning it -----------------------------------------------------------------------------------------------------


def windows(total: int) -> list[int]:
    """After which transitions of a warm-up of ``total`` the shape is estimated anew; the last tenth is left alone."""
    last = total - round(0.1 * total)
    ends, width, at = [], 10.0, 0.0
    while at + width <= last:
        at += width
        width *= 1.3
        ends.append(last if at + width > last else round(at))
    return ends


def open_window(state: State) -> None:
    """Begin a new window where the chains are."""
    factor = state["factor"]
    window.open_window(state, {"position": state["position"]}, dense=factor.dim() == 3, groups=len(factor))


def observe(state: State) -> None:
    """Count the present position of every chain."""
    window.observe(state, {"position": state["position"]})


def estimate(state: State, *, within: bool = True) -> Tensor | None:
    """The factor of the covariance of a window; None if it was too short.

    Correlations are drawn towards zero with the weight of D observations. A direction that did not move at all has
    steps much too long: its spread is taken to be a tenth of what it was.

    Args:
        state: With the window's sums.
        within: Count the spread within chains alone, or that between the chains of a group as well.
    """
    if not window.enough(state):
        return None
    covariance = window.within(state, "position")
    if not within:
        covariance = covariance + window.between(state, "position")
    return _factor_of(covariance, state["factor"], window.freedom(state, "position"))


def _factor_of(covariance: Tensor, before: Tensor, freedom: float) -> Tensor:
    if before.dim() == 2:
        return torch.where(covariance > 0, covariance.clamp_min(0.0).sqrt(), 0.1 * before.double()).to(before)
    variance = covariance.diagonal(dim1=1, dim2=2)
    std = torch.where(variance > 0, variance, 0.01 * before.double().square().sum(-1)).sqrt()
    weight = freedom / (freedom + before.shape[-1])
    correlation = weight * covariance / (std.unsqueeze(1) * std.unsqueeze(2))
    correlation.diagonal(dim1=1, dim2=2).fill_(1.0)
    lower, failed = torch.linalg.cholesky_ex(correlation)
    lower = torch.where(failed.reshape(-1, 1, 1) == 0, lower, torch.eye(before.shape[-1]).to(lower))
    return (std.unsqueeze(2) * lower).to(before).contiguous()  # as a checkpoint gives it back, so that bits agree
