"""A normal posterior with a Kronecker-factored precision for each layer, and independent layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import CorrelatedPrior
from knowable.core.network.params import Buffers, Layout, Params, pack, unpack
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument, Unsupported


class KroneckerNormal(Posterior):
    r"""Independent layers, each normal with a :class:`KroneckerBlock` as its precision.

    Args:
        model: The model.
        loc: Means of the random parameters.
        blocks: Precisions; together they hold every random parameter once.
        common: See :class:`Posterior`.
    """

    family = "kronecker_normal"

    def __init__(self, model: Model, loc: Params, blocks: Iterable[KroneckerBlock], **common: Any):
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.blocks = tuple(block.mapped(lambda value: value.detach().contiguous().clone()) for block in blocks)
        held = [name for block in self.blocks for name in block.names]
        if sorted(held) != sorted(self.loc):
            raise InvalidArgument(f"blocks must hold each of {sorted(self.loc)} once, got {sorted(held)}.")

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        drawn: Params = {}
        for block in self.blocks:
            drawn |= block.params(block.matrix(self.loc) + block.draw(n, generator))
        return {name: drawn[name] for name in self.loc}

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        found: Params = {}
        for block in self.blocks:
            found |= block.params(block.diagonal(block.precision.reciprocal()).sqrt())
        return {name: found[name] for name in self.loc}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        lacking = [name for name in self.loc if name not in params]
        if lacking:
            raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")
        terms = [block.log_prob(block.matrix(params) - block.matrix(self.loc)) for block in self.blocks]
        return torch.stack(terms).sum(0)

    def as_prior(self) -> KroneckerNormalPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        return KroneckerNormalPrior(self.loc, self.blocks, fixed=self.points, buffers=self.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        return {**{f"loc.{name}": value for name, value in self.loc.items()}, **_saved(self.blocks)}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> KroneckerNormal:
        loc = {name.removeprefix("loc."): value for name, value in tensors.items() if name.startswith("loc.")}
        return cls(model, loc, _loaded(tensors, loc), **common)


class KroneckerNormalPrior(CorrelatedPrior):
    """The same as a prior: a quadratic form in each layer's basis."""

    kind = "kronecker"

    def __init__(self, loc: Params, blocks: Iterable[KroneckerBlock], *, fixed: Params, buffers: Buffers):
        super().__init__(Layout.of(loc), loc, fixed=fixed, buffers=buffers)
        self.blocks = tuple(blocks)

    def given(self, frozen: Params) -> KroneckerNormalPrior:
        """The prior of the other layers, which do not depend on the frozen ones; a layer is frozen as a whole."""
        kept = []
        for block in self.blocks:
            held = [name for name in block.names if name in frozen]
            if not held:
                kept.append(block)
            elif len(held) < len(block.names):
                raise Unsupported(
                    f"prior is a posterior in which {' and '.join(block.names)} go together: freeze both or neither."
                )
        if len(kept) == len(self.blocks):
            return self
        names = {name for block in kept for name in block.names}
        loc = {name: value for name, value in self.loc_by_name.items() if name in names}
        return KroneckerNormalPrior(loc, kept, fixed=self.fixed, buffers=self.buffers)

    def log_det_precision(self) -> Tensor:
        """Sum over the blocks."""
        return torch.stack([block.log_det() for block in self.blocks]).sum()

    def quadratic(self, params: Params) -> Tensor:
        """Sum over the blocks."""
        means = self.loc_by_name
        return torch.stack([block.quadratic(block.matrix(params) - block.matrix(means)) for block in self.blocks]).sum()

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters."""
        drawn: Params = {}
        for block in self.blocks:
            drawn |= block.params(block.matrix(self.loc_by_name) + block.draw(1, generator)[0])
        return {name: drawn[name] for name in like}

    def precision_diagonal(self, layout: Layout) -> Tensor:
        """Diagonal of the precision."""
        found: Params = {}
        for block in self.blocks:
            found |= block.params(block.diagonal(block.precision))
        return layout.flatten(found)

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean and dense precision in the order of ``layout``: for few parameters."""
        mean = layout.flatten(self.loc_by_name)
        precision = mean.new_zeros((layout.size, layout.size))
        places = layout.views(torch.arange(layout.size, device=mean.device))
        for block in self.blocks:
            index = block.matrix(places).flatten()
            precision[index.unsqueeze(1), index] = block.dense()
        return mean, precision

    def tensors(self) -> dict[str, Tensor]:
        """The blocks."""
        return _saved(self.blocks)

    @classmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> KroneckerNormalPrior:
        """From the blocks."""
        return cls(loc, _loaded(tensors, loc), fixed=fixed, buffers=buffers)


def _saved(blocks: Iterable[KroneckerBlock]) -> dict[str, Tensor]:
    """Blocks as named tensors: ``block.3.precision`` and the like; ``block.3.name.0.weight`` says what they hold."""
    saved: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        parts = {"precision": block.precision, "out_basis": block.out_basis, "in_basis": block.in_basis}
        saved |= {f"block.{number}.{part}": value for part, value in parts.items() if value is not None}
        saved |= {f"block.{number}.name.{place}.{name}": torch.zeros(()) for place, name in enumerate(block.names)}
    return saved


def _loaded(tensors: dict[str, Tensor], loc: Params) -> list[KroneckerBlock]:
    keys = [key.split(".", 4) for key in tensors if key.startswith("block.")]
    count = 1 + max(int(key[1]) for key in keys)
    names = [
        sorted((int(key[3]), key[4]) for key in keys if key[1] == str(i) and key[2] == "name") for i in range(count)
    ]
    return [
        KroneckerBlock(
            tuple(name for _, name in held),
            tuple(loc[name].shape for _, name in held),
            tensors[f"block.{i}.precision"],
            tensors.get(f"block.{i}.out_basis"),
            tensors.get(f"block.{i}.in_basis"),
        )
        for i, held in enumerate(names)
    ]


# --- A normal distribution over a matrix, whose precision is known in a basis that is a Kronecker product ------------
#
# .. math:: P = (V_o \otimes V_i)\, \mathrm{diag}(\mathrm{vec}\, E)\, (V_o \otimes V_i)^\top
#
# with orthogonal bases for the outputs (rows) and the inputs (columns) of the matrix. A Kronecker product plus a
# multiple
# of the identity has this form, :math:`E_{ij} = g_i a_j + \delta`, and it can be sampled, inverted and its determinant
# taken at the cost of a few products of matrices. A basis left out is the identity: without both, this is a diagonal;
# with one column, it is a full precision in the basis of its eigenvectors.


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
