"""The curvature of a log likelihood: what every structure of it provides, and the full matrix."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FullCovarianceNormal, JointNormal
from knowable.core.model.likelihood import OutputInformation
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import Prior
from knowable.core.network.jacobian import BatchJacobian
from knowable.core.network.layers import Layer
from knowable.core.network.params import Layout, Params
from knowable.core.network.weight_uses import WeightUse
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.laplace.expansion import ExpansionPoint, head_use
from knowable.inference.laplace.hessian import hessian


class Curvature(ABC):
    r"""The curvature H of the negative log likelihood at some weights, on the full-data scale, in some structure.

    The posterior's precision is :math:`P = \sum_o w_o H_o + \Lambda_0`: the curvature of each noise scale with a factor
    (proportional to 1 / noise²), and the prior's precision. Both may change without another pass over the data, which
    makes tuning them cheap.
    """

    notes: tuple[str, ...] = ()  # where the curvature is not of the structure that was asked for

    @classmethod
    @abstractmethod
    def of(cls, expansion: ExpansionPoint, *, rank: int) -> Curvature:
        """Compute the curvature in one or a few passes over the data."""

    @abstractmethod
    def log_det(self, prior: PriorPrecision, weights: Tensor) -> Tensor:
        """Log determinant of P, differentiable in the prior's precision and the weights ``(groups,)``."""

    @abstractmethod
    def solve(self, prior: PriorPrecision, weights: Tensor, vector: Tensor) -> Tensor:
        """P⁻¹ v for a vector over the weights ``(D,)``."""

    @abstractmethod
    def normal(self, expansion: ExpansionPoint, prior: PriorPrecision, weights: Tensor) -> JointNormal:
        """The normal distribution with precision P around the expansion's weights."""


def undetermined() -> InvalidArgument:
    """The error where P is not positive definite."""
    return InvalidArgument(
        "The posterior precision is not positive definite: the data do not determine all weights under this prior (a "
        "flat one, or one without curvature). Give the weights a Normal prior."
    )


# --- the full matrix: for up to some thousand weights ----------------------------------------------------------------


class FullCurvature(Curvature):
    r"""One matrix over all weights: :math:`H_o = \sum_n J_n^\top \Lambda_{n,o} J_n`, or the Hessian."""

    def __init__(self, matrices: Tensor, notes: tuple[str, ...] = ()):
        self.matrices, self.notes = matrices, notes  # (groups, D, D), in double precision

    @classmethod
    def of(cls, expansion: ExpansionPoint, *, rank: int = 0) -> FullCurvature:
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

    def normal(self, expansion: ExpansionPoint, prior: PriorPrecision, weights: Tensor) -> FullCovarianceNormal:
        """With the covariance's own Cholesky factor."""
        covariance = torch.cholesky_inverse(self._factor(prior, weights))
        scale_tril = torch.linalg.cholesky(covariance).to(expansion.model.dtype)
        return FullCovarianceNormal(expansion.layout, expansion.layout.flatten(expansion.weights), scale_tril)


class _Sums:
    """Sums of outer products of gradients.

    Where the one random layer is the network's output layer they are Λ ⊗ aaᵀ: inputs are multiplied with inputs only,
    which takes far fewer products than gradients in the whole layer do. They are kept output by output, the lower half.
    """

    def __init__(self, expansion: ExpansionPoint):
        self.expansion, size = expansion, expansion.layout.size
        self.layer = expansion.layers.only
        self.sums = torch.zeros((expansion.groups, size, size), dtype=torch.float64, device=expansion.model.device)
        self.by_output = False

    @property
    def row_bytes(self) -> int:
        """Memory of the gradients of one row."""
        positions = 1 if self.layer is None else self.layer.positions
        return 4 * positions * self.expansion.layout.size * self.expansion.model.dtype.itemsize

    def add(self, rows: BatchJacobian, number: int, y: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch."""
        for group, information in enumerate(self.expansion.informations(rows.output, y, weights)):
            head = None if self.layer is None else head_use(rows, self.layer, information)
            if self.layer is not None and head is not None:
                self._add_head(rows, self.layer, head, self.sums[group], information)
                continue
            for columns in self.expansion.columns(information, number, self.row_bytes):
                flat = rows.flat(columns, self.expansion.layout).flatten(0, 1)
                self.sums[group] += second_moment(flat)

    def _add_head(
        self, rows: BatchJacobian, layer: Layer, head: WeightUse, sums: Tensor, information: OutputInformation
    ) -> None:
        self.by_output = True
        a = rows.activations[0].flatten(0, 1).double()  # (rows and positions, in); of pixels there are millions
        width, like = a.shape[1], information.diagonal()
        for number in range(head.output.shape[head.feature_dim]):
            unit = torch.zeros_like(like)
            unit.select(head.feature_dim, number).fill_(1.0)
            column = rows.at_rows(layer, head.in_front(information.times(unit))).flatten(0, 1).double()
            weighted = column[:, : number + 1].unsqueeze(2) * a.unsqueeze(1)  # (rows and positions, out, in)
            here = slice(number * width, (number + 1) * width)
            sums[here, : here.stop] += a.T @ weighted.flatten(1)

    def total(self) -> Tensor:
        """H in the order of the weights, ``(groups, D, D)``."""
        layer, layout, sums = self.layer, self.expansion.layout, self.sums
        if layer is None or not self.by_output:
            return sums
        for start in range(0, layout.size, layer.width):
            sums[:, :start, start : start + layer.width] = sums[:, start : start + layer.width, :start].mT
        places = layout.views(torch.arange(layout.size, device=sums.device))
        order = layer.matrix(places).flatten().argsort()
        return sums[:, order][:, :, order]


def _hessian(expansion: ExpansionPoint) -> tuple[Tensor, tuple[str, ...]]:
    """The Hessian of -Σ log p(y | x, θ), with negative eigenvalues set to zero."""
    model, layout = expansion.model, expansion.layout

    def loss(flat: Tensor, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        params = {**expansion.params, **layout.views(flat)}
        return -model.score(model.forward(params, x, buffers=expansion.buffers), y, params, weights).sum()

    flat = layout.flatten(expansion.params)
    total = torch.zeros((layout.size, layout.size), dtype=torch.float64, device=flat.device)
    for batch in expansion.batches():
        total += hessian(loss, flat, *batch)
    values, vectors = torch.linalg.eigh(total)
    negative = int((values < -1e-6 * values.abs().max()).sum())
    if not negative:
        return total.unsqueeze(0), ()
    positive = (vectors * values.clamp_min(0.0)) @ vectors.T
    note = f"The Hessian has {negative} negative eigenvalues of {layout.size}, which were set to 0."
    return positive.unsqueeze(0), (note,)


# --- the precision of the prior --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorPrecision:
    """The precision of the prior over the random weights, in double precision."""

    layout: Layout
    by_name: Params  # one number, or one for each element; the diagonal, of a prior with correlations
    joint: JointNormal | None = None  # the prior as a normal distribution, if it has correlations
    notes: tuple[str, ...] = ()  # where it is an approximation

    @property
    def flat(self) -> Tensor:
        """For each weight, ``(D,)``."""
        entries = zip(self.layout.names, self.layout.shapes, strict=True)
        return self.layout.flatten({name: self.by_name[name].expand(shape) for name, shape in entries})

    def dense(self) -> Tensor:
        """As a matrix, ``(D, D)``."""
        return self.flat.diag() if self.joint is None else self.joint.dense(self.layout)[1].double()


def prior_precision(expansion: ExpansionPoint, settings: Params | None = None) -> PriorPrecision:
    """The prior's precision at the expansion's weights; ``settings`` may hold other values of its hyperparameters."""
    params = {**expansion.params, **(settings or {})}
    layout, prior = expansion.layout, conditional_prior(expansion)
    if isinstance(prior, PosteriorPrior) and prior.correlated:
        diagonal = {name: value.double() for name, value in prior.normal.precision_diagonal().items()}
        return PriorPrecision(layout, diagonal, prior.normal)
    found, notes = {}, []
    for name in layout.names:
        each = expansion.model.prior.bound(name, params)
        if each is None:
            raise Unsupported(
                f"Laplace does not take {type(expansion.model.prior).__name__}, a prior of weights and noise together. "
                f"Use ExactLinear, FullRankVI or NUTS, or a Normal prior."
            )
        moments = each.normal_moments()
        if moments is None:
            found[name] = touching_precision(each, params[name].double())
            notes.append(f"{type(each).__name__} is not normal: {name} has the normal with its slope at the mode.")
        else:
            found[name] = torch.as_tensor(moments[1], dtype=torch.float64, device=expansion.model.device)
    return PriorPrecision(layout, found, None, tuple(notes))


def conditional_prior(expansion: ExpansionPoint):
    """The model's prior, given the likelihood's parameters where it ties them to the weights."""
    prior = expansion.model.prior
    if not (isinstance(prior, PosteriorPrior) and prior.correlated):
        return prior
    own = {name: value for name, value in expansion.params.items() if name not in expansion.layout.names}
    return prior.condition(own)


def touching_precision(prior: Prior, value: Tensor) -> Tensor:
    r"""The precision of the centred normal with the prior's slope at ``value``: :math:`-\psi'(w) / w`.

    For priors that are scale mixtures of normals (Laplace, Student-t, horseshoe) it is the tightest normal lower bound
    of the prior's density (Palmer et al., 2006): never negative, and defined where the density has a kink.
    """
    with torch.enable_grad():
        place = value.detach().requires_grad_()
        (slope,) = torch.autograd.grad(prior.log_prob(place).sum(), place, create_graph=True)
    tiny = torch.finfo(value.dtype).tiny ** 0.5
    return (-slope / torch.where(value.abs() > tiny, value, torch.full_like(value, tiny))).clamp_min(0.0)


_NARROWEST_BLOCK = 128  # products of thinner matrices are slow
_MOST_BLOCKS = 8


def second_moment(values: Tensor) -> Tensor:
    r"""The sum of :math:`v v^\top` over vectors v in ``values`` ``(..., n)`` or ``(..., positions, n)``: ``(n, n)``."""
    count = values.shape[-1]
    if values.dim() > 2 and values.shape[-2] > count:  # positions: many small matrices, none of which is copied
        return (values.mT @ values).flatten(0, -3).sum(0)
    in_order = values.stride(-1) == 1  # otherwise features come first in memory, as convolutions have them
    return _gram(values.reshape(-1, count).T if in_order else values.movedim(-1, 0).reshape(count, -1))


def _gram(wide: Tensor) -> Tensor:
    """``wide`` ``(n, vectors)`` times its transpose, of which only blocks on and below the diagonal are computed."""
    count = len(wide)
    found = wide.new_empty((count, count))
    start = 0
    for rows in wide.tensor_split(min(_MOST_BLOCKS, max(1, count // _NARROWEST_BLOCK))):
        stop = start + len(rows)
        torch.mm(rows, wide[:stop].T, out=found[start:stop, :stop])
        found[:start, start:stop] = found[start:stop, :start].T
        start = stop
    return found
