"""Kronecker-factored curvature of each layer (Martens and Grosse, 2015; Ritter et al., 2018)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from knowable.core.model.likelihood import Likelihood
from knowable.core.model.structured_normal import KroneckerBlock, KroneckerFactored
from knowable.core.network.jacobian import BatchJacobian
from knowable.core.network.layers import Layer
from knowable.core.network.weight_uses import WeightUse
from knowable.inference.laplace.curvature import Curvature, PriorPrecision, second_moment, undetermined
from knowable.inference.laplace.expansion import ExpansionPoint, head_use

_LARGEST_MATRIX = 512  # elements of a parameter that is no weight matrix; beyond, its curvature is diagonal


class KroneckerCurvature(Curvature):
    r"""For each layer a Kronecker product of second moments, of gradients at its outputs and of its inputs.

    .. math:: H \approx \frac1M \Big(\sum_{n,t,k} g_{ntk} g_{ntk}^\top\Big) \otimes \Big(\sum_{n,t} a_{nt}
        a_{nt}^\top\Big)

    over M rows n and positions t (positions count as rows: the "expand" setting of Eschenhagen et al., 2023). Inputs
    have a 1 at the end for the bias. A parameter that is no weight matrix has its full curvature matrix, or its
    diagonal where it is large.
    """

    def __init__(self, factors: list[Factors], notes: tuple[str, ...] = ()):
        self.factors, self.notes = factors, notes

    @classmethod
    def of(cls, expansion: ExpansionPoint, *, rank: int = 0) -> KroneckerCurvature:
        """One pass over the data."""
        sums = KroneckerSums(expansion)
        expansion.sweep(partial(kfac_update, sums), sums.row_bytes)
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

    def normal(self, expansion: ExpansionPoint, prior: PriorPrecision, weights: Tensor) -> KroneckerFactored:
        """Independent layers."""
        blocks = [block.mapped(lambda value: value.to(expansion.model.dtype)) for block in self.blocks(prior, weights)]
        return KroneckerFactored(expansion.weights, tuple(blocks))


class Factors(ABC):
    """The curvature of the parameters in one block."""

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
            added = KroneckerBlock(self.names, self.shapes, basis.matrix(elements)).along(basis)
        return replace(basis, precision=basis.precision + added)


class LayerFactors(Factors):
    """The Kronecker product of Σ ggᵀ / M, ``(groups, out, out)``, and Σ aaᵀ, ``(in, in)``."""

    def __init__(self, layer: Layer, inputs: Tensor, outputs: Tensor):
        self.names, self.shapes, self.transposed = layer.names, layer.shapes, layer.transposed
        self.inputs, self.outputs = inputs, outputs

    @cached_property
    def _input_basis(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(self.inputs)

    @cached_property
    def _output_basis(self) -> tuple[Tensor, Tensor]:
        return torch.linalg.eigh(self.outputs[0])

    def block(self, prior: PriorPrecision, weights: Tensor) -> KroneckerBlock:
        """In the eigenvectors of the two factors; with a prior that has a basis of its own, of the partial traces."""
        if self._previous(prior) is None and len(weights) == 1:
            (a, in_basis), (g, out_basis) = self._input_basis, self._output_basis
            a, g = a.clamp_min(0.0), g.clamp_min(0.0) * weights
        else:
            outputs = torch.einsum("o,oij->ij", weights, self.outputs)
            in_basis, out_basis = self._bases(outputs.detach(), self._previous(prior))
            a, g = _along(self.inputs, in_basis), _along(outputs, out_basis)
        precision = g.unsqueeze(1) * a
        found = KroneckerBlock(self.names, self.shapes, precision, out_basis, in_basis, self.transposed)
        return self._with_prior(found, prior)

    def _bases(self, outputs: Tensor, previous: KroneckerBlock | None) -> tuple[Tensor, Tensor]:
        """Eigenvectors of the partial traces of the whole precision, over outputs and over inputs."""
        if previous is None:
            return self._input_basis[1], torch.linalg.eigh(outputs)[1]
        inner = self.inputs * outputs.trace() + _matrix(previous.in_basis, previous.precision.sum(0))
        outer = outputs * self.inputs.trace() + _matrix(previous.out_basis, previous.precision.sum(1))
        return torch.linalg.eigh(inner)[1], torch.linalg.eigh(outer)[1]


class VectorFactors(Factors):
    """The whole curvature of one parameter, ``(groups, n, n)``, or its diagonal, ``(groups, n)``."""

    def __init__(self, name: str, shape: torch.Size, curvature: Tensor):
        self.names, self.shapes, self.curvature = (name,), (shape,), curvature

    def block(self, prior: PriorPrecision, weights: Tensor) -> KroneckerBlock:
        """A matrix of one column."""
        total = torch.tensordot(weights, self.curvature, dims=1)
        if total.dim() == 1:
            return self._with_prior(KroneckerBlock(self.names, self.shapes, total.unsqueeze(1)), prior)
        previous, whole = self._previous(prior), total.detach()
        if previous is not None:
            whole = whole + _matrix(previous.out_basis, previous.precision[:, 0])
        basis = torch.linalg.eigh(whole)[1]
        precision = _along(total, basis).unsqueeze(1)
        return self._with_prior(KroneckerBlock(self.names, self.shapes, precision, basis), prior)


class KroneckerSums:
    """What :func:`kfac_update` sums up.

    Attributes:
        inputs: For each layer A, ``(in, in)``.
        outputs: For each layer G, ``(groups, out, out)``.
        counts: For each layer M, the number of rows (or the sum of their weights) and positions.
        vectors: For each other parameter its curvature, ``(groups, n, n)``, or the diagonal, ``(groups, n)``.
    """

    def __init__(self, expansion: ExpansionPoint):
        groups, like = expansion.groups, {"dtype": torch.float64, "device": expansion.model.device}
        self.expansion, self.layers = expansion, expansion.layers.layers
        self.inputs = [torch.zeros((layer.width, layer.width), **like) for layer in self.layers]
        self.outputs = [torch.zeros((groups, layer.out, layer.out), **like) for layer in self.layers]
        self.counts = [0.0 for _ in self.layers]
        sizes = {name: expansion.params[name].numel() for name in expansion.layers.others}
        shapes = {name: (size, size) if size <= _LARGEST_MATRIX else (size,) for name, size in sizes.items()}
        self.vectors = {name: torch.zeros((groups, *shape), **like) for name, shape in shapes.items()}
        self.row_bytes = 2 * sum(sizes.values()) * expansion.model.dtype.itemsize  # gradients of the other parameters

    def factors(self) -> list[Factors]:
        """The curvature of each layer and each other parameter."""
        layers = zip(self.layers, self.inputs, self.outputs, self.counts, strict=True)
        found: list[Factors] = [LayerFactors(layer, a, g / (count or 1.0)) for layer, a, g, count in layers]
        shapes = {name: self.expansion.params[name].shape for name in self.vectors}
        return found + [VectorFactors(name, shapes[name], total) for name, total in self.vectors.items()]

    def notes(self) -> tuple[str, ...]:
        """Which parameters have no Kronecker factors."""
        kinds = {3: "their own full matrices", 2: "a diagonal"}
        names = {dims: [name for name, total in self.vectors.items() if total.dim() == dims] for dims in kinds}
        return tuple(
            f"No Kronecker factors for {', '.join(names[dims])}: {what} instead."
            for dims, what in kinds.items() if names[dims]
        )  # fmt: skip


def kfac_update(
    sums: KroneckerSums, jacobian: BatchJacobian, number: int, y: Tensor, weights: Tensor | None = None
) -> None:
    r"""Add a batch to the Kronecker factors.

    .. math:: A \mathrel{+}= \sum_{n,t} a_{nt} a_{nt}^\top, \qquad
        G_o \mathrel{+}= \sum_{n,t,k} g_{ntk} g_{ntk}^\top, \qquad
        g_{ntk} = \Big(\frac{\partial f_n}{\partial s_{nt}}\Big)^{\!\top} v_{nk}

    over rows n, positions t, and columns k of a root of the Fisher information in the outputs,
    :math:`\Lambda_{n,o} = \sum_k v_{nk} v_{nk}^\top`, for each noise scale o. Where the layer's outputs s are the
    network's outputs f, G is the sum of the Λ, without a backward pass. A row of weight w counts w times in A and G.
    Positions of a sequence on which no output depends (padding that the network masks) do not count, nor do rows
    without a target that counts and positions without a label.
    """
    expansion = sums.expansion
    acting: list[Tensor | None] = [None for _ in sums.layers]
    for group, information in enumerate(expansion.informations(jacobian.output, y, weights)):
        heads = [head_use(jacobian, layer, information) for layer in sums.layers]
        for use, total in zip(heads, sums.outputs, strict=True):
            if use is not None:
                total[group] += information.total(use.feature_dim)
        if None not in heads and not sums.vectors:
            continue
        for columns in expansion.columns(information, number, sums.row_bytes):
            for place, (use, g) in enumerate(zip(heads, jacobian.gradients(columns), strict=True)):
                if use is None:
                    sums.outputs[place][group] += second_moment(g)
                    acting[place] = _acting(jacobian, sums.layers[place], g, acting[place])
            for name, each in jacobian.others(columns).items():
                flat, total = each.flatten(0, 1).flatten(1), sums.vectors[name][group]
                total += second_moment(flat) if total.dim() == 2 else flat.square().sum(0)
    for place in range(len(sums.layers)):
        counts = _counts(expansion.model.likelihood, sums.layers[place].positions, y, weights)
        _add_inputs(sums, jacobian, place, counts, acting[place])


def _acting(jacobian: BatchJacobian, layer: Layer, g: Tensor, known: Tensor | None) -> Tensor | None:
    """Which positions of a sequence, ``(rows, positions)``, the outputs depend on; None where there is no sequence."""
    if layer.positions == 1 or jacobian.trace.uses[layer.uses[0]].kind != "linear":
        return None
    found = g.ne(0).any(-1).any(0)
    return found if known is None else known | found


def _add_inputs(
    sums: KroneckerSums, jacobian: BatchJacobian, place: int, counts: Tensor | None, acting: Tensor | None
) -> None:
    """Add to A and to M; ``counts`` are those of :func:`_counts`."""
    if counts is None and (acting is None or acting.all()):
        for use in (jacobian.trace.uses[each] for each in sums.layers[place].uses):
            sums.inputs[place] += input_moment(use)
            sums.counts[place] += use.count
        return
    a = jacobian.activations[place]  # (rows, positions, in)
    each = a.new_ones(a.shape[:2]) if counts is None else counts.to(a.dtype).expand(a.shape[:2])
    each = each if acting is None else each * acting
    sums.inputs[place] += second_moment(a * each.sqrt().unsqueeze(-1))
    sums.counts[place] += each.sum().item()


def _counts(likelihood: Likelihood, positions: int, y: Tensor, weights: Tensor | None) -> Tensor | None:
    """How often each row, or each of its positions where they have labels, counts: ``(rows, 1 or positions)``."""
    counts = None if weights is None else weights.unsqueeze(1)
    counted = likelihood.counted(y)
    if counted is None:
        return counts
    counted = counted.reshape(len(y), -1)
    by_position = likelihood.labels and counted.shape[1] == positions
    known = (counted if by_position else counted.any(1, keepdim=True)).double()
    return known if counts is None else counts * known


@torch.no_grad()
def input_moment(use: WeightUse) -> Tensor:
    """Sum over rows and positions of a aᵀ for a use's activations a (a 1 at the end for the bias), ``(in, in)``."""
    if use.weight is None:
        return use.output.new_full((1, 1), use.count)
    inputs = use.inputs_in_front()
    square = second_moment(inputs)
    if use.bias is None:
        return square
    sums, count = inputs.sum(tuple(range(inputs.dim() - 1))), inputs.new_full((1, 1), use.count)
    return torch.cat([torch.cat([square, sums.unsqueeze(1)], 1), torch.cat([sums.unsqueeze(0), count], 1)])


def _along(matrix: Tensor, basis: Tensor) -> Tensor:
    """The diagonal of Vᵀ M V, no smaller than zero."""
    return ((matrix @ basis) * basis).sum(0).clamp_min(0.0)


def _matrix(basis: Tensor | None, values: Tensor) -> Tensor:
    return values.diag() if basis is None else (basis * values) @ basis.T
