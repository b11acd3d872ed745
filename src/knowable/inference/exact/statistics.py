r"""The sums over the data from which posterior and evidence of a linear model follow: one pass over any number of rows.

.. math:: J^\top J, \quad J^\top (y - f_0), \quad |y - f_0|^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.data import Data
from knowable.errors import InvalidArgument
from knowable.inference.exact.design import PROBED, Design

_DIGITS = 1e-13  # of a parameter's precision, the share left when the others are known; rounding takes 1e-16 of it
_TRACED = 16_384  # rows that go through the network at once
_ROWS = 4096  # of a last layer's inputs that are multiplied at once: they stay in the cache


@dataclass(frozen=True)
class Statistics:
    """The sums, by blocks of parameters and by groups of outputs with a noise of their own.

    The outputs of a last layer do not share weights: each is a block, and all have the same matrix JᵀJ. Any other
    network is one block.
    """

    places: Tensor  # (B, d): where the parameters of each block are in the flat vector
    gram: Tensor  # (B, G, d, d): Jᵀ J of each group in the block
    cross: Tensor  # (B, G, d): Jᵀ (y - f0)
    square: Tensor  # (B, G): |y - f0|²
    rows: float  # the sum of their weights; times the outputs where these are one group

    @classmethod
    def gather(cls, design: Design, data: Data, *, apart: bool) -> Statistics:
        """One pass over the data.

        Args:
            design: The design matrix.
            data: The rows.
            apart: Whether every output has its own noise.
        """
        total: _Sums | None = None
        blocks: Tensor | None = None
        for number, (x, y, *weights) in enumerate(data):
            if number == 0:
                head = design.head(x[:PROBED])
                blocks = None if head is None else head.places
                if head is None:
                    design.check_linear(x)
            count = (weights[0] if weights else torch.ones(len(x), device=x.device)).double()
            found = _of_design(design, x, y, count, apart) if blocks is None else _of_head(design, x, y, count)
            total = found if total is None else total + found
        assert total is not None
        if blocks is None:
            places = torch.arange(design.layout.size, device=total.square.device).unsqueeze(0)
            return cls(places, total.gram.unsqueeze(0), total.cross.unsqueeze(0), total.square.unsqueeze(0), total.rows)
        gram = total.gram.expand(len(blocks), 1, *total.gram.shape)
        return cls(blocks, gram, total.cross.unsqueeze(1), total.square.unsqueeze(1), total.rows)

    @property
    def groups(self) -> int:
        """Number of groups with a noise of their own."""
        return self.square.numel()

    def posterior(self, mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and Cholesky factor of the covariance.

        Args:
            mean: Prior mean, ``(D,)``.
            precision: Prior precision, ``(D,)`` where the parameters are independent, else ``(D, D)``.
            noise: Standard deviation of the noise of each group.
        """
        chol, loc, places = self._solve(mean, precision, noise)
        covariance = _dense(torch.cholesky_inverse(chol), places)
        return loc, torch.linalg.cholesky((covariance + covariance.T) / 2)

    def log_evidence(self, mean: Tensor, precision: Tensor, noise: Tensor) -> Tensor | None:
        r"""The log marginal likelihood, by the determinant and inversion lemmas; None if the prior is improper.

        .. math:: \log \mathcal{N}\big(y \mid f_0 + J m_0,\; J \Lambda_0^{-1} J^\top + \sigma^2 I\big)
        """
        found = self.volume_and_residual(mean, precision, noise)
        if found is None:
            return None
        noise_terms = self.rows * (2 * noise.log() + math.log(2 * math.pi))
        return -0.5 * (found[0] + found[1] + noise_terms.sum())

    def volume_and_residual(self, mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor] | None:
        r"""What the evidence consists of; None if the prior is improper.

        .. math:: \log|P| - \log|\Lambda_0|, \qquad
            \tfrac{1}{\sigma^2} |y - f_0 - J m|^2 + (m - m_0)^\top \Lambda_0 (m - m_0)
        """
        log_det_prior = _log_det(precision)
        if log_det_prior is None:
            return None
        chol, loc, _ = self._solve(mean, precision, noise)
        log_det = 2 * chol.diagonal(dim1=-2, dim2=-1).log().sum() - log_det_prior
        away = loc - mean
        quadratic = (noise**-2 * self._residuals(loc)).sum() + away @ _times(precision, away)
        return log_det, quadratic

    def _solve(self, mean: Tensor, precision: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cholesky factors of the posterior precision, by block; the posterior mean; and the blocks' places."""
        weight = (noise**-2).view(self.square.shape)
        total = torch.einsum("bg,bgde->bde", weight, self.gram)
        rhs = torch.einsum("bg,bgd->bd", weight, self.cross)
        pull, places = _times(precision, mean), self.places
        if precision.dim() == 2 and len(places) > 1:  # the prior correlates the blocks: one block
            total, rhs = _dense(total, places).unsqueeze(0), _flat(rhs, places).unsqueeze(0)
            places = torch.arange(len(mean), device=mean.device).unsqueeze(0)
        if precision.dim() == 2:
            total = total + precision[places[0]][:, places[0]]
        else:
            total = total + precision[places].diag_embed()
        chol, failed = torch.linalg.cholesky_ex(total)
        improper = bool((precision if precision.dim() == 1 else precision.diagonal()).eq(0).any())
        share = (chol.diagonal(dim1=-2, dim2=-1).square() / total.diagonal(dim1=-2, dim2=-1)).detach()
        if failed.any() or not (share > _DIGITS).all() or (improper and _is_singular(total)):
            raise InvalidArgument(
                "The data do not determine all weights under a flat prior. Give the weights a Normal prior."
                if improper
                else "The noise is so small, or the prior so wide, that the weights cannot be told apart in double "
                "precision. Give more noise, Gaussian(noise=...), or a narrower prior, Normal(...)."
            )
        solved = torch.cholesky_solve((rhs + pull[places]).unsqueeze(-1), chol).squeeze(-1)
        return chol, _flat(solved, places), places

    def _residuals(self, loc: Tensor) -> Tensor:
        """Sum of squared residuals at ``loc`` for each group, no smaller than what double precision can tell."""
        own = loc[self.places]  # (B, d)
        fitted = torch.einsum("bd,bgde,be->bg", own, self.gram, own) - 2 * torch.einsum("bgd,bd->bg", self.cross, own)
        return torch.maximum(self.square + fitted, 1e-14 * self.square).flatten()


# --- one batch -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    gram: Tensor
    cross: Tensor
    square: Tensor
    rows: float

    def __add__(self, other: _Sums) -> _Sums:
        sums = (getattr(self, name) + getattr(other, name) for name in ("gram", "cross", "square", "rows"))
        return _Sums(*sums)


def _of_design(design: Design, x: Tensor, y: Tensor, count: Tensor, apart: bool) -> _Sums:
    """With whole design matrices, some rows at a time."""
    chunks = design.chunks(x)
    sizes = [len(each) for each in chunks]
    total: _Sums | None = None
    for part, target, each in zip(chunks, y.split(sizes), count.split(sizes), strict=True):
        offset, matrix = design(part)  # (rows, outputs), (rows, outputs, D)
        residual, root = target.double().flatten(1) - offset, each.sqrt().unsqueeze(1)
        matrix, residual = matrix * root.unsqueeze(1), residual * root
        groups = zip(matrix.unbind(1), residual.unbind(1), strict=True)
        if not apart:
            groups = [(matrix.flatten(0, 1), residual.flatten())]
        sums = [torch.stack(each) for each in zip(*(_products(m, r) for m, r in groups), strict=True)]
        found = _Sums(sums[0], sums[1], sums[2], each.sum().item() * (1 if apart else offset.shape[1]))
        total = found if total is None else total + found
    assert total is not None
    return total


def _of_head(design: Design, x: Tensor, y: Tensor, count: Tensor) -> _Sums:
    """With the inputs of the last layer, which all outputs share."""
    total: _Sums | None = None
    plain = bool((count == 1).all())
    for part, target, each in zip(x.split(_TRACED), y.split(_TRACED), count.split(_TRACED), strict=True):
        head = design.head(part)
        assert head is not None  # as on the first rows
        features = head.features.flatten(0, -2)
        residual = (target.double().reshape(head.offset.shape) - head.offset).flatten(0, -2)
        positions = len(features) // len(part)
        if not plain:
            root = each.sqrt().repeat_interleave(positions).unsqueeze(1)
            features, residual = features * root, residual * root
        rows = each.sum().item() * positions
        for some, left in zip(features.split(_ROWS), residual.split(_ROWS), strict=True):
            found, rows = _Sums(*_products(some, left), rows=rows), 0.0
            total = found if total is None else total + found
    assert total is not None
    return total


def _products(matrix: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """AᵀA, Aᵀr and r², with residuals ``(rows,)`` or ``(rows, outputs)``."""
    if matrix.device.type != "cpu":
        return matrix.mT @ matrix, residual.transpose(0, -1) @ matrix, residual.square().sum(0)
    array = matrix.numpy()  # NumPy knows that the product is symmetric, and computes half of it
    return torch.from_numpy(array.T @ array), residual.transpose(0, -1) @ matrix, residual.square().sum(0)


# --- blocks and the flat vector; precisions that are vectors or matrices ---------------------------------------------


def _flat(blocks: Tensor, places: Tensor) -> Tensor:
    """Vectors of the blocks ``(B, d)`` in the order of the flat vector, ``(D,)``."""
    return blocks.flatten()[places.flatten().argsort()]


def _dense(blocks: Tensor, places: Tensor) -> Tensor:
    """Matrices of the blocks ``(B, d, d)`` in the order of the flat vector, ``(D, D)``."""
    order = places.flatten().argsort()
    return torch.block_diag(*blocks)[order][:, order]


def _times(precision: Tensor, vector: Tensor) -> Tensor:
    return precision * vector if precision.dim() == 1 else precision @ vector


def _log_det(precision: Tensor) -> Tensor | None:
    if precision.dim() == 1:
        return None if (precision == 0).any() else precision.log().sum()
    chol, improper = torch.linalg.cholesky_ex(precision)
    return None if improper else 2 * chol.diagonal().log().sum()


def _is_singular(total: Tensor) -> bool:
    scale = total.diagonal(dim1=-2, dim2=-1).clamp_min(1e-300).rsqrt()
    scaled = total * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    return bool((torch.linalg.eigvalsh(scaled)[..., 0] < 1e-12).any())
