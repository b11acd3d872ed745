"""The diagonal of the curvature matrix: every weight by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.model.joint_normal import IndependentNormal
from knowable.core.network.jacobian import BatchJacobian
from knowable.inference.laplace.curvature import Curvature, FullCurvature, PriorPrecision, undetermined
from knowable.inference.laplace.expansion import ExpansionPoint, head_use


class DiagonalCurvature(Curvature):
    r"""For each weight :math:`h_d = \sum_n \sum_k (v_{nk}^\top \partial f_n / \partial \theta_d)^2`."""

    def __init__(self, diagonals: Tensor, notes: tuple[str, ...] = ()):
        self.diagonals, self.notes = diagonals, notes  # (groups, D), in double precision

    @classmethod
    def of(cls, expansion: ExpansionPoint, *, rank: int = 0) -> DiagonalCurvature:
        """Sums of squares of the rows' gradients."""
        if expansion.kind == "hessian":
            full = FullCurvature.of(expansion)
            return cls(full.matrices.diagonal(dim1=1, dim2=2).clone(), full.notes)
        sums = _Sums(expansion)
        expansion.sweep(sums.add, sums.row_bytes)
        return cls(sums.flat())

    def precision(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """Diagonal of P, ``(D,)``."""
        found = weights @ self.diagonals + prior.flat
        if not (found > 0).all():
            raise undetermined()
        return found

    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """Sum of the logarithms."""
        return self.precision(prior, weights).log().sum()

    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """Weight by weight."""
        return vector / self.precision(prior, weights)

    def normal(self, expansion: ExpansionPoint, prior: PriorPrecision, weights: Tensor) -> IndependentNormal:
        """Independent normals."""
        scale = expansion.layout.views(self.precision(prior, weights).rsqrt().to(expansion.model.dtype))
        return IndependentNormal(expansion.weights, scale)


class _Sums:
    """Sums of squared gradients: for each layer ``(groups, out, in)``, for other parameters ``(groups, *shape)``."""

    def __init__(self, expansion: ExpansionPoint):
        self.expansion, groups = expansion, expansion.groups
        like = {"dtype": torch.float64, "device": expansion.model.device}
        self.matrices = [torch.zeros((groups, layer.out, layer.width), **like) for layer in expansion.layers]
        shapes = {name: expansion.params[name].shape for name in expansion.layers.others}
        self.vectors = {name: torch.zeros((groups, *shape), **like) for name, shape in shapes.items()}

    @property
    def row_bytes(self) -> int:
        """Memory of one row's gradients where they have to be formed: of the largest layer, and of the others."""
        formed = [layer.out * layer.width for layer in self.expansion.layers if layer.positions > 1]
        others = sum(total[0].numel() for total in self.vectors.values())
        return 2 * self.expansion.model.dtype.itemsize * (max(formed, default=0) + others)

    def add(self, jacobian: BatchJacobian, number: int, y: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch."""
        layers = self.expansion.layers.layers
        for group, information in enumerate(self.expansion.informations(jacobian.output, y, weights)):
            heads = [head_use(jacobian, layer, information) for layer in layers]
            for layer, use, a, total in zip(layers, heads, jacobian.activations, self.matrices, strict=True):
                if use is not None:
                    diagonal = jacobian.at_rows(layer, use.in_front(information.diagonal()))
                    total[group] += _products(diagonal, a.square())
            if None not in heads and not self.vectors:
                continue
            for columns in self.expansion.columns(information, number, self.row_bytes):
                gradients = jacobian.gradients(columns)
                for use, a, g, total in zip(heads, jacobian.activations, gradients, self.matrices, strict=True):
                    if use is None:
                        total[group] += _squares(g, a)
                for name, each in jacobian.others(columns).items():
                    self.vectors[name][group] += each.square().sum((0, 1))

    def flat(self) -> Tensor:
        """All sums, ``(groups, D)``."""
        found = dict(self.vectors)
        for layer, total in zip(self.expansion.layers, self.matrices, strict=True):
            found |= layer.params(total)
        return self.expansion.layout.flatten(found)


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Σ over rows and positions of outer products, ``(out, in)``."""
    return first.flatten(0, 1).T @ second.flatten(0, 1)


def _squares(gradients: Tensor, activations: Tensor) -> Tensor:
    """Σ over directions and rows of the squared gradients in a matrix, each a sum of outer products over positions."""
    if activations.shape[1] == 1:
        return _products(gradients.square().sum(0), activations.square())
    return (gradients.mT @ activations).square().sum((0, 1))
