"""The whole curvature matrix: for up to some thousand weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.hessian import hessian
from knowable.inference.laplace.curvature import Curvature, undetermined
from knowable.inference.laplace.expansion import Expansion
from knowable.inference.laplace.posteriors import FullLaplace
from knowable.inference.laplace.prior_precision import PriorPrecision


class FullCurvature(Curvature):
    r"""One matrix over all weights: :math:`H_o = \sum_n J_n^\top \Lambda_{n,o} J_n`, or the Hessian.

    Args:
        matrices: H, ``(groups, D, D)``, in double precision.
        notes: See :class:`Curvature`.
    """

    def __init__(self, matrices: Tensor, notes: tuple[str, ...] = ()):
        self.matrices, self.notes = matrices, notes

    @classmethod
    def of(cls, expansion: Expansion, *, rank: int = 0) -> FullCurvature:
        """Sums of outer products of the rows' gradients."""
        if expansion.kind == "hessian":
            return cls(*_hessian(expansion))
        size = expansion.layout.size
        like = {"dtype": torch.float64, "device": expansion.model.device}
        total = torch.zeros((expansion.groups, size, size), **like)
        row_bytes = 4 * size * expansion.model.dtype.itemsize
        for number, (rows, y) in enumerate(expansion.sweep(row_bytes)):
            for group, information in enumerate(expansion.informations(rows.output, y)):
                for columns in expansion.columns(information, number, row_bytes):
                    flat = rows.flat(columns, expansion.layout).flatten(0, 1)
                    total[group] += flat.T @ flat
        return cls(total)

    def precision(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """P, ``(D, D)``."""
        return torch.einsum("o,ode->de", weights, self.matrices) + prior.dense()

    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """By the Cholesky factor."""
        return 2.0 * self._factor(prior, weights).diagonal().log().sum()

    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """By the Cholesky factor."""
        return torch.cholesky_solve(vector.unsqueeze(-1), self._factor(prior, weights)).squeeze(-1)

    def _factor(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(self.precision(prior, weights))
        if failed:
            raise undetermined()
        return factor

    def posterior(self, expansion: Expansion, prior: PriorPrecision, weights: Tensor, **common: Any) -> FullLaplace:
        """With the covariance's own Cholesky factor."""
        covariance = torch.cholesky_inverse(self._factor(prior, weights))
        scale_tril = torch.linalg.cholesky((covariance + covariance.T) / 2).to(expansion.model.dtype)
        return FullLaplace(
            expansion.model, expansion.layout, expansion.layout.flatten(expansion.weights), scale_tril, **common
        )


def _hessian(expansion: Expansion) -> tuple[Tensor, tuple[str, ...]]:
    """Second derivatives of -Σ log p(y | x, θ), with negative eigenvalues set to zero."""
    model, layout = expansion.model, expansion.layout

    def loss(flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        params = {**expansion.params, **layout.views(flat)}
        return -model.score(model.forward(params, x, buffers=expansion.buffers), y, params).sum()

    flat = layout.flatten(expansion.params)
    total = torch.zeros((layout.size, layout.size), dtype=torch.float64, device=flat.device)
    for x, y in expansion.batches():
        total += hessian(loss, flat, x, y)
    values, vectors = torch.linalg.eigh(total)
    negative = int((values < -1e-6 * values.abs().max()).sum())
    if not negative:
        return total.unsqueeze(0), ()
    positive = (vectors * values.clamp_min(0.0)) @ vectors.T
    note = f"The Hessian curves down in {negative} of {layout.size} directions, where only the prior is kept."
    return positive.unsqueeze(0), (note,)
