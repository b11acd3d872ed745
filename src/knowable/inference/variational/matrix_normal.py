"""Matrix-normal variational inference (Louizos and Welling, 2016)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from knowable.core.model.model import Model
from knowable.core.model.structured_normal import KroneckerBlock
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.normal import KroneckerNormal
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import fast_randn
from knowable.inference.variational.divergence import HALF_LOG_TWO_PI_E
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.structured import (
    Family,
    FamilyModule,
    StructuredObjective,
    check_groups,
    group_weights,
    lower_factor,
)

_ALTERNATIONS = 50  # between rows and columns, for the matrix normal nearest to a normal


@dataclass(frozen=True)
class MatrixNormal(Family):
    r"""A matrix normal for every weight matrix of a group, independent of the others.

    .. math:: q(W) = \mathcal{MN}(W \mid M, U, V)

    A convolution's weight is a matrix with a row for each output channel. Biases and other vectors (scales of
    normalisation layers, the noise of a likelihood) are not matrices: they get independent normals.

    Args:
        full_up_to: A side with more rows or columns than this gets a diagonal factor: a full one costs as much as this
            many rows of data going through the layer.
    """

    full_up_to: int = 512

    def __post_init__(self) -> None:
        check_count("full_up_to", self.full_up_to)

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> MatrixNormalModule:
        """See :meth:`Family.build`."""
        return MatrixNormalModule(layout, loc, initial_scale, self.full_up_to)


class MatrixNormalModule(FamilyModule):
    r"""Means, and a factor of the covariance for each parameter.

    .. math:: W = M + A\, E\, B^\top, \qquad \mathrm{Cov}[\mathrm{vec}\, W] = A A^\top \otimes B B^\top, \qquad
        A = \mathrm{diag}(a)\,(I + R_A)

    with strictly lower triangular R, and B likewise: the rows (outputs) and the columns (inputs) of a layer are each
    correlated by one matrix. In this form R has no unit, and one step size suits it and the logarithms of a and b.
    """

    normal_marginals: ClassVar[bool] = True

    def __init__(self, layout: Layout, loc: Tensor, initial_scale: float, full_up_to: int):
        super().__init__(layout)
        self.loc = nn.Parameter(loc.detach().clone())
        self.factors: Iterable[Factor] = nn.ModuleList(  # type: ignore[assignment]
            MatrixFactor(shape, initial_scale, full_up_to, like=loc)
            if len(shape) > 1
            else VectorFactor(shape, initial_scale, like=loc)
            for shape in layout.shapes
        )

    def draw(self, count: int) -> tuple[Tensor, None]:
        """See :meth:`FamilyModule.draw`."""
        noise = fast_randn(count, len(self.loc), like=self.loc).split(self.layout.sizes, dim=1)
        shifts = [factor.spread(each) for factor, each in zip(self.factors, noise, strict=True)]
        return self.loc + torch.cat(shifts, dim=1), None

    def entropy(self) -> Tensor:
        """Sum of those of the parameters."""
        half_log_det = torch.stack([factor.half_log_det() for factor in self.factors]).sum()
        return half_log_det + HALF_LOG_TWO_PI_E * len(self.loc)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and variances."""
        return self.loc, torch.cat([factor.variances() for factor in self.factors])

    def held_log_density(self, values: Tensor) -> Tensor:
        """See :meth:`FamilyModule.held_log_density`."""
        away = (values - self.loc.detach()).split(self.layout.sizes, dim=1)
        noise = [factor.unspread(each) for factor, each in zip(self.factors, away, strict=True)]
        return -0.5 * torch.cat(noise, dim=1).square().sum(-1)

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """Each parameter for itself, given its own block."""
        self.loc.copy_(mean)
        places = torch.arange(len(mean)).split(self.layout.sizes)
        for factor, own in zip(self.factors, places, strict=True):
            factor.fit_normal(precision[own][:, own])

    def posterior(self, model: Model, **common: Any) -> KroneckerNormal:
        """A normal with a Kronecker product for each matrix."""
        entries = zip(self.layout.names, self.layout.shapes, self.factors, strict=True)
        blocks = [KroneckerBlock((name,), (shape,), *factor.precision()) for name, shape, factor in entries]
        return KroneckerNormal(model, self.layout.views(self.loc.detach()), blocks, **common)


class Factor(nn.Module, ABC):
    """The covariance of one parameter of n numbers."""

    @abstractmethod
    def spread(self, noise: Tensor) -> Tensor:
        """Deviations from the mean ``(K, n)`` from standard normal noise."""

    @abstractmethod
    def unspread(self, away: Tensor) -> Tensor:
        """The inverse of :meth:`spread`, with the parameters held."""

    @abstractmethod
    def half_log_det(self) -> Tensor:
        """Half the log determinant of the covariance."""

    @abstractmethod
    def variances(self) -> Tensor:
        """Diagonal of the covariance, ``(n,)``."""

    @abstractmethod
    def fit_normal(self, precision: Tensor) -> None:
        """Become the nearest to a normal with this precision, ``(n, n)``."""

    @abstractmethod
    def precision(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Precisions along a basis, and that basis, as in a Kronecker block."""


class VectorFactor(Factor):
    """Independent normals for a vector or a single number."""

    def __init__(self, shape: torch.Size, initial_scale: float, *, like: Tensor):
        super().__init__()
        self.log_scale = nn.Parameter(like.new_full((shape.numel(),), math.log(initial_scale)))

    def spread(self, noise: Tensor) -> Tensor:
        """Noise times scale."""
        return noise * self.log_scale.exp()

    def unspread(self, away: Tensor) -> Tensor:
        """Deviation over scale."""
        return away / self.log_scale.detach().exp()

    def half_log_det(self) -> Tensor:
        """Sum over the numbers."""
        return self.log_scale.sum()

    def variances(self) -> Tensor:
        """Squared scales."""
        return (2.0 * self.log_scale).exp()

    def fit_normal(self, precision: Tensor) -> None:
        """For each number its precision given all others."""
        self.log_scale.copy_(-0.5 * precision.diagonal().log())

    def precision(self) -> tuple[Tensor, None, None]:
        """As a block of one column, without bases."""
        return (-2.0 * self.log_scale.detach()).exp().unsqueeze(1), None, None


class MatrixFactor(Factor):
    """The two factors of a matrix ``(n, m)``."""

    def __init__(self, shape: torch.Size, initial_scale: float, full_up_to: int, *, like: Tensor):
        super().__init__()
        self.rows = Side(shape[0], initial_scale, full_up_to, like=like)
        self.columns = Side(shape[1:].numel(), 1.0, full_up_to, like=like)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return len(self.rows.log_scale), len(self.columns.log_scale)

    def spread(self, noise: Tensor) -> Tensor:
        """A E Bᵀ for standard normal noise ``(K, n m)``."""
        matrix = noise.view(-1, *self.shape)
        sides = self.rows.log_scale.exp(), self.rows.mix, self.columns.log_scale.exp(), self.columns.mix
        return Spread.apply(matrix, *sides).flatten(1)

    def unspread(self, away: Tensor) -> Tensor:
        """The inverse of :meth:`spread`, with the parameters held."""
        matrix = away.view(-1, *self.shape)
        return self.columns.undone(self.rows.undone(matrix).mT).mT.flatten(1)

    def half_log_det(self) -> Tensor:
        """Half the log determinant of the covariance: of each factor, as often as the other has rows."""
        n, m = self.shape
        return m * self.rows.log_scale.sum() + n * self.columns.log_scale.sum()

    def variances(self) -> Tensor:
        """Diagonal of the covariance, ``(n m,)``."""
        return torch.outer(self.rows.variances(), self.columns.variances()).flatten()

    def fit_normal(self, precision: Tensor) -> None:
        r"""Each side in turn, given the other.

        With covariances U of the rows and V of the columns,

        .. math:: U^{-1}_{ik} = \frac1m \sum_{jl} P_{ij,kl} V_{jl}, \qquad
            V^{-1}_{jl} = \frac1n \sum_{ik} P_{ij,kl} U_{ik}
        """
        n, m = self.shape
        blocks = precision.view(n, m, n, m)
        columns = torch.einsum("ijij->j", blocks).div(n).reciprocal().diag()
        for _ in range(_ALTERNATIONS if n > 1 and m > 1 else 2):
            rows = self.rows.fit_normal(torch.einsum("ijkl,jl->ik", blocks, columns) / m)
            columns = self.columns.fit_normal(torch.einsum("ijkl,ik->jl", blocks, rows) / n)

    def precision(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Precisions along the eigenvectors of the two factors, and these."""
        (row_variance, row_basis), (column_variance, column_basis) = self.rows.spectrum(), self.columns.spectrum()
        return torch.outer(row_variance, column_variance).reciprocal(), row_basis, column_basis


class Side(nn.Module):
    """A lower triangular factor diag(a) (I + R) with n rows, or a diagonal one.

    Attributes:
        log_scale: Logarithms of a, ``(n,)``.
        mix: R, ``(n, n)``, strictly lower triangular: it begins at zero, and gradients are zero above; None for a
            diagonal factor.
    """

    def __init__(self, size: int, initial_scale: float, full_up_to: int, *, like: Tensor):
        super().__init__()
        self.log_scale = nn.Parameter(like.new_full((size,), math.log(initial_scale)))
        self.mix = nn.Parameter(like.new_zeros(size, size)) if 1 < size <= full_up_to else None

    def fit_normal(self, precision: Tensor) -> Tensor:
        """Become the factor of a normal with this precision; its covariance, ``(n, n)``."""
        if self.mix is None:
            self.log_scale.copy_(-0.5 * precision.diagonal().log())
            return precision.diagonal().reciprocal().diag()
        factor = lower_factor(precision)
        self.log_scale.copy_(factor.diagonal().log())
        self.mix.copy_((factor / factor.diagonal().unsqueeze(1)).tril(-1))
        return factor @ factor.T

    def undone(self, matrix: Tensor) -> Tensor:
        """A⁻¹ X with the parameters held."""
        standard = matrix / self.log_scale.detach().exp().unsqueeze(1)
        if self.mix is None:
            return standard
        return torch.linalg.solve_triangular(self.mix.detach(), standard, upper=False, unitriangular=True)

    def variances(self) -> Tensor:
        """Diagonal of A Aᵀ, ``(n,)``."""
        scale = (2.0 * self.log_scale).exp()
        return scale if self.mix is None else scale * (1.0 + self.mix.square().sum(1))

    def spectrum(self) -> tuple[Tensor, Tensor | None]:
        """Eigenvalues and eigenvectors of A Aᵀ, computed in double precision; no eigenvectors of a diagonal."""
        scale = self.log_scale.detach().exp()
        if self.mix is None:
            return scale.square(), None
        triangle = self.mix.detach().double()
        triangle = triangle + torch.eye(len(scale), dtype=triangle.dtype, device=triangle.device)
        vectors, values, _ = torch.linalg.svd(scale.double().unsqueeze(1) * triangle)
        return values.square().to(scale), vectors.to(scale)


class Spread(torch.autograd.Function):
    """diag(a) (I + R_A) E (I + R_B)ᵀ diag(b), with its gradient written by hand: few passes beside the products."""

    @staticmethod
    def forward(ctx, noise: Tensor, a: Tensor, row_mix: Tensor | None, b: Tensor, column_mix: Tensor | None):
        """For noise E ``(K, n, m)``, scales a ``(n,)`` and b ``(m,)``, and R or None for zero."""
        half = noise * b if column_mix is None else (noise @ column_mix.T).add_(noise).mul_(b)
        shift = half.clone() if row_mix is None else (row_mix @ half).add_(half)
        shift.mul_(a.unsqueeze(1))
        ctx.save_for_backward(noise, a, row_mix, b, column_mix, half, shift)
        return shift

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Gradients of a, R_A, b and R_B."""
        noise, a, row_mix, b, column_mix, half, shift = ctx.saved_tensors
        grad_a = (grad * shift).sum((0, 2)) / a
        grad = grad * a.unsqueeze(1)
        grad_row = None if row_mix is None else torch.einsum("kim,kjm->ij", grad, half).tril_(-1)
        grad_half = grad if row_mix is None else (row_mix.T @ grad).add_(grad)
        grad_b = (grad_half * half).sum((0, 1)) / b
        grad_column = None
        if column_mix is not None:
            scaled = grad_half * b
            grad_column = (scaled.flatten(0, 1).T @ noise.flatten(0, 1)).tril_(-1)
        return None, grad_a, grad_row, grad_b, grad_column


@dataclass(frozen=True, repr=False, kw_only=True)
class MatrixNormalVI(VariationalMethod):
    r"""A matrix normal distribution for every weight matrix: correlated rows and correlated columns.

    .. math:: q(W) = \mathcal{MN}(W \mid M, U, V), \qquad \mathrm{Cov}[\mathrm{vec}\, W] = U \otimes V

    One covariance U between the outputs of a layer and one V between its inputs, instead of one between all weights.
    Layers are independent of each other, and biases and other vectors, which are not matrices, are independent
    normals. It is exact where the posterior is of that form: a linear layer with equal noise on all outputs.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (those of a MAP fit, in which
            learned scales of the prior stay at their initial values), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
        draws: Weight draws per step; None is one.
        families: Families for groups of weights by name, glob or ``"last_layer"``, such as
            ``{"head.*": kn.families.FullRank()}``; the first match wins. All other weights have the method's own.
        kl_gradient: ``"closed"``: from the closed form of the KL, where there is one. ``"path"``: along the draws that
            the likelihood is given (Roeder et al., 2017), whose noise cancels as q approaches the posterior.
            ``"auto"``: ``"path"`` for a full covariance, or a radial or real NVP flow, of up to 300 weights. All aim at
            the same optimum.
        full_up_to: A matrix with more rows (or columns) than this has a diagonal U (or V).

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> posterior = kn.MatrixNormalVI(epochs=200).fit(kn.Model(net, kn.Gaussian(noise=0.1)), (x, x.sin()))
        >>> len(posterior.blocks)
        4
    """

    family = "variational"
    says_rise = True
    summary = "a matrix normal for every weight matrix: correlated rows, correlated columns"
    aliases = ("mnvi",)
    references = ("louizos2016",)

    initial_scale: float = 0.02
    temperature: float = 1.0
    draws: int | None = None
    families: Mapping[str, Family] | None = None
    kl_gradient: str = "auto"
    full_up_to: int = MatrixNormal.full_up_to

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_groups(self.draws, self.families, self.kl_gradient)
        check_count("full_up_to", self.full_up_to)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> StructuredObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        groups = group_weights(self.families or {}, MatrixNormal(self.full_up_to), model)
        return StructuredObjective(
            model, size, groups, kl_gradient=self.kl_gradient, draws=self.draws or 1, **self.elbo_settings(start)
        )
