"""A normal distribution whose covariance is a diagonal and a low-rank part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.joint_normal import FlatNormal, standard_noise
from knowable.core.network.params import Layout, Params


@dataclass(frozen=True, eq=False)
class DiagonalPlusLowRank(FlatNormal):
    r"""A diagonal and a low-rank part.

    .. math:: \Sigma = D^{1/2} \big(I + Q\, \mathrm{diag}(\lambda - 1)\, Q^\top\big) D^{1/2}

    with orthonormal columns Q: along them, in units of the diagonal's scales, the variance is λ, and 1 across. Both a
    covariance of the form diagonal + F Fᵀ (λ > 1) and a precision of that form (λ < 1) can be written like this, and in
    this form sampling, density and conversion from one to the other take O(D k).

    Attributes:
        layout: Order of the parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale: Square roots of the diagonal D, ``(D,)``.
        basis: Q, ``(D, k)``, with orthonormal columns.
        basis_variance: λ, ``(k,)``, above 0.
    """

    kind = "low_rank"

    layout: Layout
    loc: Tensor
    scale: Tensor
    basis: Tensor
    basis_variance: Tensor

    @classmethod
    def of_covariance(cls, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor) -> DiagonalPlusLowRank:
        """The covariance is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        scale = diagonal.sqrt()
        basis, excess = directions(factor / scale.unsqueeze(1))
        return cls(layout, loc, scale, basis, 1.0 + excess)

    @classmethod
    def of_precision(cls, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor) -> DiagonalPlusLowRank:
        """The precision (inverse covariance) is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        scale = diagonal.rsqrt()
        basis, excess = directions(factor * scale.unsqueeze(1))
        return cls(layout, loc, scale, basis, (1.0 + excess).reciprocal())

    def sample(self, n: int, generator: torch.Generator | None) -> Params:
        """Draw n sets of parameters, stacked along a new leading dimension."""
        noise = standard_noise(n, self.loc, generator)
        along = (noise @ self.basis) * (self.basis_variance.sqrt() - 1.0)
        return self.layout.views(self.loc + self.scale * (noise + along @ self.basis.T))

    def std(self) -> Params:
        """Standard deviations by name."""
        variance = 1.0 + self.basis.square() @ (self.basis_variance - 1.0)
        return self.layout.views(self.scale * variance.clamp_min(0.0).sqrt())

    def quadratic(self, params: Params) -> Tensor:
        """(θ - μ)ᵀ P (θ - μ) in O(D k)."""
        standard = (self.layout.flatten(params) - self.loc) / self.scale
        return standard.square().sum(-1) + (standard @ self.basis).square() @ (self.basis_variance.reciprocal() - 1.0)

    def log_det_precision(self) -> Tensor:
        """-2 Σ log s - Σ log λ."""
        return -(2.0 * self.scale.log().sum() + self.basis_variance.log().sum())

    def precision_parts(self, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Diagonal ``(D,)``, factor F ``(D, k)`` and signs c ``(k,)`` of the precision diag + F diag(c) Fᵀ."""
        order = self.places(layout)
        excess = self.basis_variance.reciprocal() - 1.0
        factor = (self.basis / self.scale.unsqueeze(1)) * excess.abs().sqrt()
        return self.scale[order] ** -2, factor[order], excess.sign()

    def precision_diagonal(self) -> Params:
        """Diagonal of the precision matrix, by name."""
        diagonal, factor, signs = self.precision_parts(self.layout)
        return self.layout.views(diagonal + factor.square() @ signs)

    def precision_matrix(self) -> Tensor:
        """The precision matrix, formed."""
        diagonal, factor, signs = self.precision_parts(self.layout)
        return diagonal.diag() + (factor * signs) @ factor.T

    def condition(self, known: Params) -> DiagonalPlusLowRank:
        r"""The distribution of the other parameters o, given those in ``known``, f.

        .. math:: P_{oo}, \qquad \mu_o - P_{oo}^{-1} P_{of} (\theta_f - \mu_f)
        """
        layouts = self.split(known)
        if layouts is None:
            return self
        others, held = layouts
        diagonal, factor, signs = self.precision_parts(others)
        _, held_factor, _ = self.precision_parts(held)
        away = held.flatten(known).to(self.loc) - held.flatten(self.means)
        shift = factor @ (signs * (held_factor.T @ away))  # the diagonal does not couple the two
        scale = diagonal.rsqrt()
        basis, excess = directions(factor * scale.unsqueeze(1), signs)
        variance = (1.0 + excess).reciprocal()
        standard = shift * scale
        standard = standard + basis @ ((variance - 1.0) * (basis.T @ standard))
        return DiagonalPlusLowRank(others, others.flatten(self.means) - scale * standard, scale, basis, variance)

    def tensors(self) -> dict[str, Tensor]:
        """Scales, Q and λ."""
        return {"scale": self.scale, "basis": self.basis, "stretch": self.basis_variance}

    @classmethod
    def from_tensors(cls, loc: Params, tensors: dict[str, Tensor]) -> DiagonalPlusLowRank:
        """From scales, Q and λ."""
        layout = Layout.of(loc)
        return cls(layout, layout.flatten(loc), *(tensors[part] for part in ("scale", "basis", "stretch")))


def directions(factor: Tensor, signs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Orthonormal Q ``(D, k)`` and e ``(k,)`` with Q diag(e) Qᵀ = F diag(signs) Fᵀ, computed in double precision.

    There are at most D columns, whatever the number of columns of ``factor`` F.
    """
    wide = factor.double()
    basis, triangle = torch.linalg.qr(wide)  # (D, m), (m, k) with m = min(D, k)
    inner = triangle @ triangle.T if signs is None else (triangle * signs.double()) @ triangle.T
    values, vectors = torch.linalg.eigh(inner)
    values = values.clamp_min(0.0) if signs is None else values
    return (basis @ vectors).to(factor.dtype), values.to(factor.dtype)
