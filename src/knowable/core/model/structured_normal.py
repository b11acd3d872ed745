"""Normals with a Kronecker-factored precision for each layer, and with a diagonal plus low-rank covariance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FlatNormal, JointNormal, standard_noise
from knowable.core.network.params import Layout, Params, joined_params, pack, unpack
from knowable.errors import InvalidArgument, Unsupported


@dataclass(frozen=True, eq=False)
class KroneckerFactored(JointNormal):
    """Independent layers, each normal with a :class:`KroneckerBlock` as its precision."""

    kind = "kronecker"

    loc: Params  # means by name
    blocks: tuple[KroneckerBlock, ...]  # precisions; together they hold every parameter once

    def __post_init__(self) -> None:
        held = [name for block in self.blocks for name in block.names]
        if sorted(held) != sorted(self.loc):
            raise InvalidArgument(f"blocks must hold each of {sorted(self.loc)} once, got {sorted(held)}.")

    @property
    def means(self) -> Params:
        return self.loc

    @cached_property
    def layout(self) -> Layout:
        """Order of the parameters in a flat vector."""
        return Layout.of(self.loc)

    def _over_blocks(self, function: Callable[[KroneckerBlock], Tensor]) -> Params:
        """What a function of each block gives, matrices ``(..., out, in)``, by name."""
        found = joined_params(block.params(function(block)) for block in self.blocks)
        return {name: found[name] for name in self.loc}

    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        return self._over_blocks(lambda block: block.matrix(self.loc) + block.draw(n, generator))

    def std(self) -> Params:
        return self._over_blocks(lambda block: block.diagonal(block.precision.reciprocal()).sqrt())

    def quadratic(self, params: Params) -> Tensor:
        each = [block.quadratic(block.matrix(params) - block.matrix(self.loc)) for block in self.blocks]
        return torch.stack(each).sum(0)

    def log_det_precision(self) -> Tensor:
        return torch.stack([block.log_det() for block in self.blocks]).sum()

    def precision_diagonal(self) -> Params:
        return self._over_blocks(lambda block: block.diagonal(block.precision))

    def precision_matrix(self) -> Tensor:
        precision = self.blocks[0].precision.new_zeros((self.layout.size, self.layout.size))
        places = self.layout.views(torch.arange(self.layout.size, device=precision.device))
        for block in self.blocks:
            index = block.matrix(places).flatten()
            precision[index.unsqueeze(1), index] = block.dense()
        return precision

    def condition(self, known: Params) -> KroneckerFactored:
        """The other layers, which do not depend on the known ones; a layer is known as a whole."""
        kept = []
        for block in self.blocks:
            held = [name for name in block.names if name in known]
            if not held:
                kept.append(block)
            elif len(held) < len(block.names):
                raise Unsupported(
                    f"prior is a posterior in which {' and '.join(block.names)} go together: freeze both or neither."
                )
        return KroneckerFactored({k: v for k, v in self.loc.items() if k not in known}, tuple(kept))

    def tensors(self) -> dict[str, Tensor]:
        """The blocks: ``block.3.precision`` and the like; ``block.3.name.0.weight`` says what they hold."""
        saved: dict[str, Tensor] = {}
        for number, block in enumerate(self.blocks):
            parts = {"precision": block.precision, "out_basis": block.out_basis, "in_basis": block.in_basis}
            saved |= {f"block.{number}.{part}": value for part, value in parts.items() if value is not None}
            saved |= {f"block.{number}.name.{place}.{name}": torch.zeros(()) for place, name in enumerate(block.names)}
            saved |= {f"block.{number}.transposed": torch.zeros(())} if block.transposed else {}
        return saved

    @classmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> KroneckerFactored:
        keys = [key.split(".", 4) for key in tensors if key.startswith("block.")]
        blocks = []
        for i in range(1 + max(int(key[1]) for key in keys)):
            places = sorted((int(key[3]), key[4]) for key in keys if key[1] == str(i) and key[2] == "name")
            names = tuple(name for _, name in places)
            parts = (tensors.get(f"block.{i}.{part}") for part in ("out_basis", "in_basis"))
            shapes, transposed = tuple(loc[name].shape for name in names), f"block.{i}.transposed" in tensors
            blocks.append(KroneckerBlock(names, shapes, tensors[f"block.{i}.precision"], *parts, transposed=transposed))
        return cls(loc, tuple(blocks))

    def copied(self) -> KroneckerFactored:
        loc = {name: value.detach().clone() for name, value in self.loc.items()}
        blocks = (block.mapped(lambda value: value.detach().contiguous().clone()) for block in self.blocks)
        return KroneckerFactored(loc, tuple(blocks))


@dataclass(frozen=True)
class KroneckerBlock:
    r"""The precision of one weight matrix, with its bias as a last column if there is one.

    .. math:: P = (V_o \otimes V_i)\, \mathrm{diag}(\mathrm{vec}\, E)\, (V_o \otimes V_i)^\top

    with orthogonal bases for the outputs (rows) and the inputs (columns) of the matrix. A Kronecker product plus a
    multiple of the identity has this form, :math:`E_{ij} = g_i a_j + \delta`, and it can be sampled, inverted and its
    determinant taken at the cost of a few products of matrices. A basis left out is the identity: without both, this is
    a diagonal; with one column, it is a full precision in the basis of its eigenvectors.
    """

    names: tuple[str, ...]  # the parameters it holds: one, or a weight and a bias
    shapes: tuple[torch.Size, ...]  # their shapes
    precision: Tensor  # E, (out, in): precisions along the basis, above 0
    out_basis: Tensor | None = None  # orthogonal (out, out), or None for the identity
    in_basis: Tensor | None = None  # orthogonal (in, in), or None for the identity
    transposed: bool = False  # whether the weight is held as (in, out)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.precision.numel()

    def matrix(self, params: Params) -> Tensor:
        """The block's parameters as matrices ``(..., out, in)``; leading dimensions are kept."""
        return pack(params, self.names, self.shapes, self.precision.shape[0], transposed=self.transposed)

    def params(self, matrix: Tensor) -> Params:
        """The inverse of :meth:`matrix`."""
        return unpack(matrix, self.names, self.shapes, transposed=self.transposed)

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
        """The quadratic form dᵀ P d of deviations d ``(..., out, in)``."""
        return (self.rotate(deviation).square() * self.precision).sum((-2, -1))

    def log_det(self) -> Tensor:
        """Log determinant of the precision."""
        return self.precision.log().sum()

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
        out, inner = (None if basis is None else function(basis) for basis in (self.out_basis, self.in_basis))
        return replace(self, precision=function(self.precision), out_basis=out, in_basis=inner)


def _squared_overlap(own: Tensor | None, other: Tensor | None, values: Tensor) -> Tensor:
    """Σ_k (v_kᵀ u_i)² values_k over the columns v of ``own`` and u of ``other``."""
    if own is None and other is None:
        return values
    overlap = other if own is None else own.mT if other is None else own.mT @ other
    assert overlap is not None
    return overlap.square().mT @ values


@dataclass(frozen=True, eq=False)
class DiagonalPlusLowRank(FlatNormal):
    r"""A diagonal and a low-rank part.

    .. math:: \Sigma = D^{1/2} \big(I + Q\, \mathrm{diag}(\lambda - 1)\, Q^\top\big) D^{1/2}

    with orthonormal columns Q: along them, in units of the diagonal's scales, the variance is λ, and 1 across. Both a
    covariance of the form diagonal + F Fᵀ (λ > 1) and a precision of that form (λ < 1) can be written like this, and in
    this form sampling, density and conversion from one to the other take O(D k).
    """

    kind = "low_rank"

    layout: Layout  # order of the parameters in the flat vector
    loc: Tensor  # mean, (D,)
    scale: Tensor  # square roots of the diagonal D, (D,)
    basis: Tensor  # Q, (D, k), with orthonormal columns
    basis_variance: Tensor  # λ, (k,), above 0

    @classmethod
    def of_covariance(cls, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor) -> DiagonalPlusLowRank:
        """The covariance is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        scale = diagonal.sqrt()
        basis, excess = directions(factor, scale=scale.reciprocal())
        return cls(layout, loc, scale, basis, 1.0 + excess)

    @classmethod
    def of_precision(cls, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor) -> DiagonalPlusLowRank:
        """The precision (inverse covariance) is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        scale = diagonal.rsqrt()
        basis, excess = directions(factor, scale=scale)
        return cls(layout, loc, scale, basis, (1.0 + excess).reciprocal())

    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        noise = standard_noise(n, self.loc, generator)
        along = (noise @ self.basis) * (self.basis_variance.sqrt() - 1.0)
        return self.layout.views(self.loc + self.scale * (noise + along @ self.basis.T))

    def std(self) -> Params:
        variance = 1.0 + self.basis.square() @ (self.basis_variance - 1.0)
        return self.layout.views(self.scale * variance.clamp_min(0.0).sqrt())

    def quadratic(self, params: Params) -> Tensor:
        standard = (self.layout.flatten(params) - self.loc) / self.scale
        return standard.square().sum(-1) + (standard @ self.basis).square() @ (self.basis_variance.reciprocal() - 1.0)

    def log_det_precision(self) -> Tensor:
        return -(2.0 * self.scale.log().sum() + self.basis_variance.log().sum())

    def precision_parts(self, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Diagonal ``(D,)``, factor F ``(D, k)`` and signs c ``(k,)`` of the precision diag + F diag(c) Fᵀ."""
        order = self.places(layout)
        excess = self.basis_variance.reciprocal() - 1.0
        factor = (self.basis / self.scale.unsqueeze(1)) * excess.abs().sqrt()
        return self.scale[order] ** -2, factor[order], excess.sign()

    def precision_diagonal(self) -> Params:
        diagonal, factor, signs = self.precision_parts(self.layout)
        return self.layout.views(diagonal + factor.square() @ signs)

    def precision_matrix(self) -> Tensor:
        diagonal, factor, signs = self.precision_parts(self.layout)
        return diagonal.diag() + (factor * signs) @ factor.T

    def condition(self, known: Params) -> DiagonalPlusLowRank:
        layouts = self.split(known)
        if layouts is None:
            return self
        others, held = layouts
        diagonal, factor, signs = self.precision_parts(others)
        _, held_factor, _ = self.precision_parts(held)
        away = held.flatten(known).to(self.loc) - held.flatten(self.means)
        shift = factor @ (signs * (held_factor.T @ away))  # the diagonal does not couple the two
        scale = diagonal.rsqrt()
        basis, excess = directions(factor, signs, scale=scale)
        variance = (1.0 + excess).reciprocal()
        standard = shift * scale
        standard = standard + basis @ ((variance - 1.0) * (basis.T @ standard))
        return DiagonalPlusLowRank(others, others.flatten(self.means) - scale * standard, scale, basis, variance)

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "basis": self.basis, "stretch": self.basis_variance}

    @classmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> DiagonalPlusLowRank:
        layout = Layout.of(loc)
        return cls(layout, layout.flatten(loc), *(tensors[part] for part in ("scale", "basis", "stretch")))


_ROWS = 2**18  # of a factor that are in double precision at one time


def directions(factor: Tensor, signs: Tensor | None = None, *, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Orthonormal Q ``(D, k)`` and e ``(k,)`` with Q diag(e) Qᵀ = F diag(signs) Fᵀ, computed in double precision.

    There are at most D columns, whatever the number of columns of ``factor`` F. Its rows are first multiplied by
    ``scale`` ``(D,)``. Long factors are taken apart block of rows by block of rows, so that double precision takes
    little memory.
    """
    parts = factor.split(max(_ROWS, factor.shape[1])) if len(factor) else (factor,)
    scales = [None] * len(parts) if scale is None else scale.split([len(part) for part in parts])
    triangle = torch.cat([_rotated(part, own)[1] for part, own in zip(parts, scales, strict=True)])
    turn, triangle = torch.linalg.qr(triangle)  # of the parts' own bases
    inner = triangle @ triangle.T if signs is None else (triangle * signs.double()) @ triangle.T
    values, vectors = torch.linalg.eigh(inner)
    values = values.clamp_min(0.0) if signs is None else values
    basis, first = factor.new_empty((len(factor), len(values))), 0
    turns = (turn @ vectors).split([min(part.shape) for part in parts])
    for part, own, turned in zip(parts, scales, turns, strict=True):
        basis[first : first + len(part)] = _rotated(part, own)[0] @ turned
        first += len(part)
    return basis, values.to(factor.dtype)


def _rotated(part: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Q and R of some rows, in double precision."""
    wide = part.double()
    return torch.linalg.qr(wide if scale is None else wide * scale.double().unsqueeze(1))
