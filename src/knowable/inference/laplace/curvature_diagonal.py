"""The diagonal of the curvature matrix: every weight by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import IndependentNormal
from knowable.core.model.output_information import OutputInformation
from knowable.inference.laplace.curvature import Curvature, FullCurvature, PriorPrecision, undetermined
from knowable.inference.laplace.expansion import Expansion, Rows
from knowable.inference.laplace.posteriors import LaplacePosterior


class DiagonalCurvature(Curvature):
    r"""For each weight :math:`h_d = \sum_n \sum_k (v_{nk}^\top \partial f_n / \partial \theta_d)^2`.

    Args:
        diagonals: h, ``(groups, D)``, in double precision.
        notes: See :class:`Curvature`.
    """

    def __init__(self, diagonals: Tensor, notes: tuple[str, ...] = ()):
        self.diagonals, self.notes = diagonals, notes

    @classmethod
    def of(cls, expansion: Expansion, *, rank: int = 0) -> DiagonalCurvature:
        """Sums of squares of the rows' gradients."""
        if expansion.kind == "hessian":
            full = FullCurvature.of(expansion)
            return cls(full.matrices.diagonal(dim1=1, dim2=2).clone(), full.notes)
        totals = [_Sums(expansion) for _ in range(expansion.groups)]

        def add(rows: Rows, y: Tensor, number: int) -> None:
            for group, information in enumerate(expansion.informations(rows.output, y)):
                totals[group].add(rows, information, number)

        expansion.sweep(add, _row_bytes(expansion))
        return cls(torch.stack([total.flat() for total in totals]))

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

    def posterior(
        self, expansion: Expansion, prior: PriorPrecision, weights: Tensor, **common: Any
    ) -> LaplacePosterior:
        """Independent normals."""
        scale = expansion.layout.views(self.precision(prior, weights).rsqrt().to(expansion.model.dtype))
        return LaplacePosterior(expansion.model, IndependentNormal(expansion.weights, scale), **common)


class _Sums:
    """Sums of squared gradients of all parameters."""

    def __init__(self, expansion: Expansion):
        self.expansion, self.anatomy = expansion, expansion.anatomy
        like = {"dtype": torch.float64, "device": expansion.model.device}
        self.layers = [torch.zeros((layer.out, layer.width), **like) for layer in self.anatomy.layers]
        self.others = {name: torch.zeros(expansion.params[name].shape, **like) for name in self.anatomy.others}

    def add(self, rows: Rows, information: OutputInformation, number: int) -> None:
        """Take a batch."""
        heads = [rows.head(layer, information) for layer in range(len(self.layers))]
        for layer, use in enumerate(heads):
            if use is not None:
                diagonal = rows.in_place(layer, use.in_front(information.diagonal()))
                self.layers[layer] += _products(diagonal, rows.activations[layer].square())
        if all(use is not None for use in heads) and not self.others:
            return
        for columns in self.expansion.columns(information, number, _row_bytes(self.expansion)):
            for layer, gradients in enumerate(rows.gradients(columns)):
                if heads[layer] is None:
                    self.layers[layer] += _squares(gradients, rows.activations[layer])
            for name, gradients in rows.others(columns).items():
                self.others[name] += gradients.square().sum((0, 1))

    def flat(self) -> Tensor:
        """All of them, in the order of the weights."""
        found = dict(self.others)
        for layer, total in zip(self.anatomy.layers, self.layers, strict=True):
            if len(layer.names) == 2:
                found[layer.names[1]], total = total[:, -1], total[:, :-1]
            found[layer.names[0]] = total.reshape(layer.shapes[0])
        return self.expansion.layout.flatten(found)


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Σ over rows and positions of outer products, ``(out, in)``."""
    return first.flatten(0, 1).T @ second.flatten(0, 1)


def _squares(gradients: Tensor, activations: Tensor) -> Tensor:
    """Σ over directions and rows of the squared gradients in a matrix, each a sum of outer products over positions."""
    if activations.shape[1] == 1:
        return _products(gradients.square().sum(0), activations.square())
    return (gradients.mT @ activations).square().sum((0, 1))


def _row_bytes(expansion: Expansion) -> int:
    """What the gradients of one row take where they have to be formed: of the largest layer, and of the others."""
    size = expansion.model.dtype.itemsize
    shared = [layer.out * layer.width for layer in expansion.anatomy.layers if layer.positions > 1]
    others = sum(expansion.params[name].numel() for name in expansion.anatomy.others)
    return 2 * size * (max(shared, default=0) + others)
