"""Kronecker-factored curvature of each layer (Martens and Grosse, 2015; Ritter et al., 2018)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.kronecker import KroneckerBlock, KroneckerFactored, pack
from knowable.core.model.output_information import OutputInformation
from knowable.core.network.params import Params
from knowable.inference.laplace.curvature import Curvature, PriorPrecision, undetermined
from knowable.inference.laplace.expansion import Expansion, Rows
from knowable.inference.laplace.layers import Layer
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.inference.laplace.weight_uses import second_moment

_LARGEST_MATRIX = 512  # elements of a parameter that is no weight matrix; beyond, it gets a diagonal


class KroneckerCurvature(Curvature):
    r"""For each layer a Kronecker product of second moments, of gradients at its outputs and of its inputs.

    .. math:: H \approx \frac1M \Big(\sum_{n,t,k} g_{ntk} g_{ntk}^\top\Big) \otimes \Big(\sum_{n,t} a_{nt}
        a_{nt}^\top\Big)

    over rows n and positions t, M in all (positions count as rows: the "expand" setting of Eschenhagen et al., 2023).
    Inputs have a 1 at the end for the bias. Parameters that are no weight matrices have the whole matrix of their own,
    or its diagonal where they are large.

    Args:
        factors: One for each layer and other parameter.
        notes: See :class:`Curvature`.
    """

    def __init__(self, factors: list[Factors], notes: tuple[str, ...] = ()):
        self.factors, self.notes = factors, notes

    @classmethod
    def of(cls, expansion: Expansion, *, rank: int = 0) -> KroneckerCurvature:
        """One pass over the data."""
        sums = _Sums(expansion)
        expansion.sweep(sums.add, sums.row_bytes)
        return cls(sums.factors(), sums.notes())

    def blocks(self, prior: PriorPrecision, weights: Tensor) -> list[KroneckerBlock]:
        """P, block by block."""
        found = [factors.block(prior, weights) for factors in self.factors]
        if not all((block.precision > 0).all() for block in found):
            raise undetermined()
        return found

    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """Sum of the logarithms of the precisions along the bases."""
        return torch.stack([block.log_det() for block in self.blocks(prior, weights)]).sum()

    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """Block by block."""
        parts, found = prior.layout.views(vector), {}
        for block in self.blocks(prior, weights):
            found |= block.params(block.back(block.rotate(block.matrix(parts)) / block.precision))
        return prior.layout.flatten(found)

    def posterior(
        self, expansion: Expansion, prior: PriorPrecision, weights: Tensor, **common: Any
    ) -> LaplacePosterior:
        """Independent layers."""
        blocks = [block.mapped(lambda value: value.to(expansion.model.dtype)) for block in self.blocks(prior, weights)]
        return LaplacePosterior(expansion.model, KroneckerFactored(expansion.weights, tuple(blocks)), **common)


class Factors(ABC):
    """The curvature of the parameters in one block.

    Attributes:
        names: The parameters.
        shapes: Their shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @abstractmethod
    def block(self, prior: PriorPrecision, weights: Tensor) -> KroneckerBlock:
        """The posterior's precision."""

    def _previous(self, prior: PriorPrecision) -> KroneckerBlock | None:
        """The same block in the prior, where that was a posterior of this kind."""
        if not isinstance(prior.joint, KroneckerFactored):
            return None
        found = (block for block in prior.joint.blocks if block.names == self.names)
        return next((block.mapped(Tensor.double) for block in found), None)

    def _with_prior(self, basis: KroneckerBlock, prior: PriorPrecision) -> KroneckerBlock:
        """The curvature, known along a basis, with the diagonal of the prior's precision along that basis added."""
        previous = self._previous(prior)
        own = [prior.by_name[name] for name in self.names]
        if previous is not None:
            added = previous.along(basis)
        elif len(own) == 1 and own[0].numel() == 1:
            added = own[0].reshape(())
        elif basis.in_basis is not None and all(each.numel() == 1 for each in own):
            share = basis.in_basis[-1].square()  # of the bias in each direction
            added = own[0].reshape(()) * (1.0 - share) + own[1].reshape(()) * share
        else:
            entries = zip(self.names, self.shapes, strict=True)
            elements = {name: prior.by_name[name].expand(shape) for name, shape in entries}
            matrix = pack(elements, self.names, self.shapes, basis.precision.shape[0])
            plain = KroneckerBlock(self.names, self.shapes, matrix)
            added = plain.along(basis)
        return KroneckerBlock(self.names, self.shapes, basis.precision + added, basis.out_basis, basis.in_basis)


class LayerFactors(Factors):
    """A Kronecker product.

    Args:
        layer: The layer.
        inputs: Sum of aaᵀ, ``(in, in)``.
        outputs: Sum of ggᵀ over M, ``(groups, out, out)``.
    """

    def __init__(self, layer: Layer, inputs: Tensor, outputs: Tensor):
        self.names, self.shapes = layer.names, layer.shapes
        self.inputs, self.outputs = inputs, outputs

    @cached_property
    def _input_basis(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.inputs)
        return values.clamp_min(0.0), vectors

    @cached_property
    def _output_basis(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.outputs[0])
        return values.clamp_min(0.0), vectors

    def block(self, prior: PriorPrecision, weights: Tensor) -> KroneckerBlock:
        """In the eigenvectors of the two factors; with a prior that has a basis of its own, of the partial traces."""
        if self._previous(prior) is None and len(weights) == 1:
            (a, in_basis), (g, out_basis) = self._input_basis, self._output_basis
            g = g * weights
        else:
            outputs = torch.einsum("o,oij->ij", weights, self.outputs)
            in_basis, out_basis = self._bases(outputs.detach(), self._previous(prior))
            a, g = _along(self.inputs, in_basis), _along(outputs, out_basis)
        precision = g.unsqueeze(1) * a
        return self._with_prior(KroneckerBlock(self.names, self.shapes, precision, out_basis, in_basis), prior)

    def _bases(self, outputs: Tensor, previous: KroneckerBlock | None) -> tuple[Tensor, Tensor]:
        """Eigenvectors of the partial traces of the whole precision, over outputs and over inputs."""
        if previous is None:
            return self._input_basis[1], torch.linalg.eigh(outputs)[1]
        inner = self.inputs * outputs.trace() + _matrix(previous.in_basis, previous.precision.sum(0))
        outer = outputs * self.inputs.trace() + _matrix(previous.out_basis, previous.precision.sum(1))
        return torch.linalg.eigh(inner)[1], torch.linalg.eigh(outer)[1]


class VectorFactors(Factors):
    """The whole curvature of one parameter, or its diagonal.

    Args:
        name: The parameter.
        shape: Its shape.
        curvature: ``(groups, n, n)``, or ``(groups, n)``.
    """

    def __init__(self, name: str, shape: torch.Size, curvature: Tensor):
        self.names, self.shapes, self.curvature = (name,), (shape,), curvature

    def block(self, prior: PriorPrecision, weights: Tensor) -> KroneckerBlock:
        """A matrix of one column."""
        total = torch.tensordot(weights, self.curvature, dims=1)
        if total.dim() == 1:
            return self._with_prior(KroneckerBlock(self.names, self.shapes, total.unsqueeze(1)), prior)
        previous = self._previous(prior)
        whole = total.detach()
        if previous is not None:
            whole = whole + _matrix(previous.out_basis, previous.precision[:, 0])
        basis = torch.linalg.eigh(whole)[1]
        precision = _along(total, basis).unsqueeze(1)
        return self._with_prior(KroneckerBlock(self.names, self.shapes, precision, basis), prior)


class _Sums:
    """Second moments, as they come in."""

    def __init__(self, expansion: Expansion):
        self.expansion, self.anatomy = expansion, expansion.anatomy
        groups, like = expansion.groups, {"dtype": torch.float64, "device": expansion.model.device}
        layers = self.anatomy.layers
        self.inputs = [torch.zeros((layer.width, layer.width), **like) for layer in layers]
        self.outputs = [torch.zeros((groups, layer.out, layer.out), **like) for layer in layers]
        self.count = [0 for _ in layers]
        self.vectors: Params = {}
        for name in self.anatomy.others:
            size = expansion.params[name].numel()
            shape = (groups, size, size) if size <= _LARGEST_MATRIX else (groups, size)
            self.vectors[name] = torch.zeros(shape, **like)

    @property
    def row_bytes(self) -> int:
        """What the gradients of the other parameters take for one row."""
        sizes = [self.expansion.params[name].numel() for name in self.anatomy.others]
        return 2 * sum(sizes) * self.expansion.model.dtype.itemsize

    def add(self, rows: Rows, y: Tensor, number: int) -> None:
        """Take a batch."""
        for place, layer in enumerate(self.anatomy.layers):
            for use in (rows.recording.uses[each] for each in layer.uses):
                self.inputs[place] += use.second_moment()
                self.count[place] += use.count
        for group, information in enumerate(self.expansion.informations(rows.output, y)):
            self._add_outputs(rows, group, information, number)

    def _add_outputs(self, rows: Rows, group: int, information: OutputInformation, number: int) -> None:
        heads = [rows.head(layer, information) for layer in range(len(self.inputs))]
        for layer, use in enumerate(heads):
            if use is not None:
                self.outputs[layer][group] += information.total(use.feature_dim)
        if all(use is not None for use in heads) and not self.vectors:
            return
        for columns in self.expansion.columns(information, number, self.row_bytes):
            for layer, gradients in enumerate(rows.gradients(columns)):
                if heads[layer] is None:
                    self.outputs[layer][group] += second_moment(gradients)
            for name, gradients in rows.others(columns).items():
                flat, total = gradients.flatten(0, 1).flatten(1), self.vectors[name][group]
                total += second_moment(flat) if total.dim() == 2 else flat.square().sum(0)

    def factors(self) -> list[Factors]:
        """What was summed up."""
        layers = zip(self.anatomy.layers, self.inputs, self.outputs, self.count, strict=True)
        found: list[Factors] = [LayerFactors(layer, a, g / max(1, count)) for layer, a, g, count in layers]
        shapes = {name: self.expansion.params[name].shape for name in self.vectors}
        return found + [VectorFactors(name, shapes[name], total) for name, total in self.vectors.items()]

    def notes(self) -> tuple[str, ...]:
        """Which parameters have no Kronecker factors."""
        kinds = {3: "their own full matrices", 2: "a diagonal"}
        said = []
        for dims, what in kinds.items():
            names = [name for name, total in self.vectors.items() if total.dim() == dims]
            if names:
                said.append(f"No Kronecker factors for {', '.join(names)}: {what} instead.")
        return tuple(said)


def _along(matrix: Tensor, basis: Tensor) -> Tensor:
    """Diagonal of Vᵀ M V, no smaller than zero."""
    return ((matrix @ basis) * basis).sum(0).clamp_min(0.0)


def _matrix(basis: Tensor | None, values: Tensor) -> Tensor:
    return values.diag() if basis is None else (basis * values) @ basis.T
