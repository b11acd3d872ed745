r"""A normal distribution over a matrix, whose precision is known in a basis that is a Kronecker product.

.. math:: P = (V_o \otimes V_i)\, \mathrm{diag}(\mathrm{vec}\, E)\, (V_o \otimes V_i)^\top

with orthogonal bases for the outputs (rows) and the inputs (columns) of the matrix. A Kronecker product plus a multiple
of the identity has this form, :math:`E_{ij} = g_i a_j + \delta`, and it can be sampled, inverted and its determinant
taken at the cost of a few products of matrices. A basis left out is the identity: without both, this is a diagonal;
with one column, it is a full precision in the basis of its eigenvectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.types import Params


@dataclass(frozen=True)
class KroneckerBlock:
    """The precision of one weight matrix, with its bias as a last column if there is one.

    Attributes:
        names: The parameters it holds: one, or a weight and a bias.
        shapes: Their shapes.
        precision: E, ``(out, in)``: precisions along the basis, above 0.
        out_basis: Orthogonal ``(out, out)``, or None for the identity.
        in_basis: Orthogonal ``(in, in)``, or None for the identity.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    precision: Tensor
    out_basis: Tensor | None = None
    in_basis: Tensor | None = None

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.precision.numel()

    def matrix(self, params: Params) -> Tensor:
        """The block's parameters as matrices ``(..., out, in)``; leading dimensions are kept."""
        return pack(params, self.names, self.shapes, self.precision.shape[0])

    def params(self, matrix: Tensor) -> Params:
        """The inverse of :meth:`matrix`."""
        return unpack(matrix, self.names, self.shapes)

    def rotate(self, matrix: Tensor) -> Tensor:
        """Into the basis: V_oᵀ M V_i."""
        matrix = matrix if self.out_basis is None else self.out_basis.mT @ matrix
        return matrix if self.in_basis is None else matrix @ self.in_basis

    def back(self, matrix: Tensor) -> Tensor:
        """Out of the basis: V_o M V_iᵀ."""
        matrix = matrix if self.out_basis is None else self.out_basis @ matrix
        return matrix if self.in_basis is None else matrix @ self.in_basis.mT

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Deviations from the mean, ``(n, out, in)``."""
        like = {"dtype": self.precision.dtype, "device": self.precision.device}
        noise = torch.randn((n, *self.precision.shape), generator=generator, **like)
        return self.back(noise * self.precision.rsqrt())

    def quadratic(self, deviation: Tensor) -> Tensor:
        """Dᵀ P d for deviations ``(..., out, in)``."""
        return (self.rotate(deviation).square() * self.precision).sum((-2, -1))

    def log_det(self) -> Tensor:
        """Log determinant of the precision."""
        return self.precision.log().sum()

    def log_prob(self, deviation: Tensor) -> Tensor:
        """Log density at deviations from the mean ``(..., out, in)``."""
        return 0.5 * (self.log_det() - self.quadratic(deviation) - self.size * math.log(2 * math.pi))

    def diagonal(self, values: Tensor) -> Tensor:
        """Diagonal, ``(out, in)``, of the matrix that has ``values`` ``(out, in)`` along the basis."""
        values = values if self.out_basis is None else self.out_basis.square() @ values
        return values if self.in_basis is None else values @ self.in_basis.square().mT

    def along(self, basis: KroneckerBlock) -> Tensor:
        """Diagonal of this precision in the basis of another block of the same parameters, ``(out, in)``."""
        values = _squared_overlap(self.out_basis, basis.out_basis, self.precision)
        return _squared_overlap(self.in_basis, basis.in_basis, values.mT).mT

    def dense(self) -> Tensor:
        """The precision as a matrix over the rows of the block, one after the other: for small blocks."""
        out, width = self.precision.shape
        identity = torch.eye(self.size, dtype=self.precision.dtype, device=self.precision.device)
        rotated = self.rotate(identity.view(self.size, out, width)) * self.precision.sqrt()
        return rotated.flatten(1) @ rotated.flatten(1).T

    def mapped(self, function: Callable[[Tensor], Tensor]) -> KroneckerBlock:
        """The block with a function applied to its tensors (to change their dtype, say)."""
        bases = [None if basis is None else function(basis) for basis in (self.out_basis, self.in_basis)]
        return KroneckerBlock(self.names, self.shapes, function(self.precision), *bases)


def _squared_overlap(own: Tensor | None, other: Tensor | None, values: Tensor) -> Tensor:
    """Σ_k (v_kᵀ u_i)² values_k over the columns v of ``own`` and u of ``other``."""
    if own is None and other is None:
        return values
    overlap = other if own is None else own.mT if other is None else own.mT @ other
    assert overlap is not None
    return overlap.square().mT @ values


def pack(params: Params, names: tuple[str, ...], shapes: tuple[torch.Size, ...], out: int) -> Tensor:
    """Parameters as matrices ``(..., out, in)``: the first one reshaped, a second one (the bias) as the last column."""
    first = params[names[0]]
    lead = first.shape[: first.dim() - len(shapes[0])]
    matrix = first.reshape(*lead, out, shapes[0].numel() // out)
    return matrix if len(names) == 1 else torch.cat([matrix, params[names[1]].unsqueeze(-1)], dim=-1)


def unpack(matrix: Tensor, names: tuple[str, ...], shapes: tuple[torch.Size, ...]) -> Params:
    """The inverse of :func:`pack`."""
    lead = matrix.shape[:-2]
    if len(names) == 1:
        return {names[0]: matrix.reshape((*lead, *shapes[0]))}
    weight, bias = matrix[..., :-1], matrix[..., -1]
    return {names[0]: weight.reshape((*lead, *shapes[0])), names[1]: bias.reshape((*lead, *shapes[1]))}
