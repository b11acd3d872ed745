"""What the curvature of a log likelihood must be able to do, whatever its structure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FullCovarianceNormal, JointNormal
from knowable.core.model.kronecker import pack
from knowable.core.model.output_information import OutputInformation
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import Prior
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument
from knowable.inference.laplace.expansion import Expansion, Rows
from knowable.inference.laplace.hessian import hessian
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.inference.laplace.weight_uses import Use, second_moment


class Curvature(ABC):
    r"""The curvature H of the negative log likelihood at some weights, on the full-data scale, in some structure.

    The posterior's precision is :math:`P = \sum_o w_o H_o + \Lambda_0`: the curvature of each noise with a factor
    (inversely proportional to the noise's square) and the prior's precision. Both may change after the pass over the
    data, which is what makes tuning them cheap.

    Attributes:
        notes: What was done differently from what was asked for.
    """

    notes: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def of(cls, expansion: Expansion, *, rank: int) -> Curvature:
        """Go through the data once (or a few times)."""

    @abstractmethod
    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """Log determinant of P, differentiable in the prior's precision and the weights ``(groups,)``."""

    @abstractmethod
    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """P⁻¹ v for a vector over the weights ``(D,)``."""

    @abstractmethod
    def posterior(self, expansion: Expansion, prior: PriorPrecision, weights: Tensor, **common: Any) -> Posterior:
        """The normal distribution with precision P around the expansion's weights."""


def undetermined() -> InvalidArgument:
    """The error where P is not positive definite."""
    return InvalidArgument(
        "The data do not determine all weights under this prior (a flat one, or one without curvature). Give them a "
        "Normal prior."
    )


# --- The whole curvature matrix: for up to some thousand weights -----------------------------------------------------


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
        sums = _Sums(expansion)
        expansion.sweep(sums.add, sums.row_bytes)
        return cls(sums.total())

    def precision(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """P, ``(D, D)``."""
        total = torch.tensordot(weights, self.matrices, dims=1)
        if prior.joint is not None:
            return total + prior.dense()
        total.diagonal().add_(prior.flat)
        return total

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

    def posterior(
        self, expansion: Expansion, prior: PriorPrecision, weights: Tensor, **common: Any
    ) -> LaplacePosterior:
        """With the covariance's own Cholesky factor."""
        covariance = torch.cholesky_inverse(self._factor(prior, weights))
        scale_tril = torch.linalg.cholesky(covariance).to(expansion.model.dtype)
        normal = FullCovarianceNormal(expansion.layout, expansion.layout.flatten(expansion.weights), scale_tril)
        return LaplacePosterior(expansion.model, normal, **common)


class _Sums:
    """Outer products of gradients, as they come in.

    Where the one random layer is the network's head they are Λ ⊗ aaᵀ: inputs are multiplied with inputs only, which
    takes far fewer products than gradients in the whole layer do. These are kept output by output, the lower half.
    """

    def __init__(self, expansion: Expansion):
        self.expansion, size = expansion, expansion.layout.size
        self.layer = expansion.anatomy.layers[0] if expansion.anatomy.is_one_layer else None
        self.sums = torch.zeros((expansion.groups, size, size), dtype=torch.float64, device=expansion.model.device)
        self.by_output = False

    @property
    def row_bytes(self) -> int:
        """What the gradients of one row take."""
        positions = 1 if self.layer is None else self.layer.positions
        return 4 * positions * self.expansion.layout.size * self.expansion.model.dtype.itemsize

    def add(self, rows: Rows, y: Tensor, number: int) -> None:
        """Take a batch."""
        for group, information in enumerate(self.expansion.informations(rows.output, y)):
            head = None if self.layer is None else rows.head(0, information)
            if head is not None:
                self._add_head(rows, head, group, information)
                continue
            for columns in self.expansion.columns(information, number, self.row_bytes):
                flat = rows.flat(columns, self.expansion.layout).flatten(0, 1)
                self.sums[group] += second_moment(flat)

    def _add_head(self, rows: Rows, head: Use, group: int, information: OutputInformation) -> None:
        self.by_output = True
        a = rows.activations[0].flatten(0, 1)  # (rows and positions, in)
        width, like = a.shape[1], information.diagonal()
        for number in range(head.output.shape[head.feature_dim]):
            unit = torch.zeros_like(like)
            unit.select(head.feature_dim, number).fill_(1.0)
            column = rows.in_place(0, head.in_front(information.times(unit))).flatten(0, 1)  # (rows and positions, out)
            weighted = column[:, : number + 1].unsqueeze(2) * a.unsqueeze(1)
            here = slice(number * width, (number + 1) * width)
            self.sums[group, here, : here.stop] += a.T @ weighted.flatten(1)

    def total(self) -> Tensor:
        """H in the order of the weights, ``(groups, D, D)``."""
        if not self.by_output:
            return self.sums
        assert self.layer is not None
        layer, layout, sums = self.layer, self.expansion.layout, self.sums
        for start in range(0, layout.size, layer.width):
            sums[:, :start, start : start + layer.width] = sums[:, start : start + layer.width, :start].mT
        places = layout.views(torch.arange(layout.size, device=sums.device))
        order = pack(places, layer.names, layer.shapes, layer.out).flatten().argsort()
        return sums[:, order][:, :, order]


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


# --- How sharply the prior holds the weights -------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorPrecision:
    """The precision of the prior over the random weights, in double precision.

    Attributes:
        layout: The random weights.
        by_name: For each its precision: one number, or one for each element. Of a prior with correlations it is the
            diagonal.
        joint: The prior as a normal distribution, if it has correlations.
        notes: What is not exact about it.
    """

    layout: Layout
    by_name: Params
    joint: JointNormal | None = None
    notes: tuple[str, ...] = ()

    @property
    def flat(self) -> Tensor:
        """For each weight, ``(D,)``."""
        entries = zip(self.layout.names, self.layout.shapes, strict=True)
        return self.layout.flatten({name: self.by_name[name].expand(shape) for name, shape in entries})

    def dense(self) -> Tensor:
        """As a matrix, ``(D, D)``."""
        return self.flat.diag() if self.joint is None else self.joint.dense(self.layout)[1].double()


def prior_precision(expansion: Expansion, settings: Params | None = None) -> PriorPrecision:
    """The prior's precision at the expansion's weights; ``settings`` may hold other values of its hyperparameters."""
    params = {**expansion.params, **(settings or {})}
    layout, prior = expansion.layout, conditional_prior(expansion)
    if isinstance(prior, PosteriorPrior) and prior.correlated:
        diagonal = {name: value.double() for name, value in prior.normal.precision_diagonal().items()}
        return PriorPrecision(layout, diagonal, prior.normal)
    found, notes = {}, []
    for name in layout.names:
        each = expansion.model.prior.bound(name, params)
        assert each is not None  # the prior factorises
        moments = each.normal_moments()
        if moments is None:
            found[name] = touching_precision(each, params[name].double())
            notes.append(f"{type(each).__name__} is not normal: {name} has the normal that touches it at the mode.")
        else:
            found[name] = torch.as_tensor(moments[1], dtype=torch.float64, device=expansion.model.device)
    return PriorPrecision(layout, found, None, tuple(notes))


def conditional_prior(expansion: Expansion):
    """The model's prior, given the likelihood's parameters where it ties them to the weights."""
    prior = expansion.model.prior
    if not (isinstance(prior, PosteriorPrior) and prior.correlated):
        return prior
    own = {name: value for name, value in expansion.params.items() if name not in expansion.layout.names}
    return prior.condition(own)


def touching_precision(prior: Prior, value: Tensor) -> Tensor:
    r"""The precision of the centred normal with the prior's slope at ``value``: :math:`-\psi'(w) / w`.

    For priors that are scale mixtures of normals (Laplace, Student-t, horseshoe) it is the one that touches the prior's
    density from below (Palmer et al., 2006): never negative, and defined where the density has a kink.
    """
    with torch.enable_grad():
        place = value.detach().requires_grad_()
        (slope,) = torch.autograd.grad(prior.log_prob(place).sum(), place, create_graph=True)
    tiny = torch.finfo(value.dtype).tiny ** 0.5
    return (-slope / torch.where(value.abs() > tiny, value, torch.full_like(value, tiny))).clamp_min(0.0)
