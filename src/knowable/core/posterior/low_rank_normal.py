r"""A normal posterior whose covariance is a diagonal and a low-rank part.

.. math:: \Sigma = D^{1/2} \big(I + Q\, \mathrm{diag}(\lambda - 1)\, Q^\top\big) D^{1/2}

with orthonormal columns Q: along them, in units of the diagonal's scales, the variance is λ, and 1 across. Both a
covariance of the form diagonal + F Fᵀ (λ > 1) and a precision of that form (λ < 1) can be written like this, and in
this form sampling, density and conversion from one to the other take O(D k).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import CorrelatedPrior
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument


class LowRankNormal(Posterior):
    r"""A normal distribution with a diagonal and k directions of their own.

    Make one from a covariance or a precision with :meth:`of_covariance` and :meth:`of_precision`.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale: Roots of the diagonal, ``(D,)``.
        basis: Q, ``(D, k)``, with orthonormal columns.
        stretch: λ, ``(k,)``, above 0.
        common: See :class:`Posterior`.
    """

    family = "low_rank_normal"

    def __init__(
        self, model: Model, layout: Layout, loc: Tensor, scale: Tensor, basis: Tensor, stretch: Tensor, **common: Any
    ):
        super().__init__(model, **common)
        self.layout = layout
        self.loc, self.scale = loc.detach().clone(), scale.detach().clone()
        self.basis, self.stretch = basis.detach().contiguous().clone(), stretch.detach().clone()

    @classmethod
    def of_covariance(
        cls, model: Model, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor, **common: Any
    ) -> LowRankNormal:
        """The covariance is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        scale = diagonal.sqrt()
        basis, excess = directions(factor / scale.unsqueeze(1))
        return cls(model, layout, loc, scale, basis, 1.0 + excess, **common)

    @classmethod
    def of_precision(
        cls, model: Model, layout: Layout, loc: Tensor, diagonal: Tensor, factor: Tensor, **common: Any
    ) -> LowRankNormal:
        """The precision (inverse covariance) is diag(``diagonal``) + F Fᵀ with ``factor`` F ``(D, k)``."""
        scale = diagonal.rsqrt()
        basis, excess = directions(factor * scale.unsqueeze(1))
        return cls(model, layout, loc, scale, basis, (1.0 + excess).reciprocal(), **common)

    @property
    def rank(self) -> int:
        """Number of directions k."""
        return len(self.stretch)

    def spread(self, noise: Tensor) -> Tensor:
        """Standard normal ``noise`` ``(..., D)`` turned into deviations from the mean."""
        along = (noise @ self.basis) * (self.stretch.sqrt() - 1.0)
        return self.scale * (noise + along @ self.basis.T)

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        noise = torch.randn((n, len(self.loc)), generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.layout.views(self.loc + self.spread(noise))

    def _mean_random(self) -> Params:
        return self.layout.views(self.loc.clone())

    def _std_random(self) -> Params:
        variance = 1.0 + self.basis.square() @ (self.stretch - 1.0)
        return self.layout.views(self.scale * variance.clamp_min(0.0).sqrt())

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        lacking = [name for name in self.layout.names if name not in params]
        if lacking:
            raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")
        standard = (self.layout.flatten(params) - self.loc) / self.scale
        along = standard @ self.basis
        squares = standard.square().sum(-1) + along.square() @ (self.stretch.reciprocal() - 1.0)
        log_det = 2.0 * self.scale.log().sum() + self.stretch.log().sum()
        return -0.5 * (squares + log_det + len(self.loc) * math.log(2 * math.pi))

    def as_prior(self) -> LowRankNormalPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        return LowRankNormalPrior(
            self.layout, self.loc, self.scale, self.basis, self.stretch, fixed=self.points, buffers=self.buffers
        )

    def _tensors(self) -> dict[str, Tensor]:
        entries = enumerate(zip(self.layout.names, self.layout.shapes, strict=True))
        shapes = {f"shape.{i}.{name}": torch.zeros(shape) for i, (name, shape) in entries}
        return {"loc": self.loc, "scale": self.scale, "basis": self.basis, "stretch": self.stretch, **shapes}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> LowRankNormal:
        keys = sorted((k.split(".", 2) for k in tensors if k.startswith("shape.")), key=lambda parts: int(parts[1]))
        layout = Layout(tuple(parts[2] for parts in keys), tuple(tensors[".".join(parts)].shape for parts in keys))
        return cls(model, layout, *(tensors[part] for part in ("loc", "scale", "basis", "stretch")), **common)


class LowRankNormalPrior(CorrelatedPrior):
    """The same as a prior."""

    kind = "low_rank"

    def __init__(
        self, layout: Layout, loc: Tensor, scale: Tensor, basis: Tensor, stretch: Tensor, *, fixed: Params,
        buffers: Buffers,
    ):  # fmt: skip
        super().__init__(layout, layout.views(loc), fixed=fixed, buffers=buffers)
        self.loc, self.scale, self.basis, self.stretch = loc, scale, basis, stretch

    def precision_parts(self, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Diagonal ``(D,)``, factor F ``(D, k)`` and signs c ``(k,)`` of the precision diag + F diag(c) Fᵀ."""
        order = layout.flatten(self.layout.views(torch.arange(self.layout.size, device=self.loc.device)))
        excess = self.stretch.reciprocal() - 1.0
        factor = (self.basis / self.scale.unsqueeze(1)) * excess.abs().sqrt()
        return self.scale[order] ** -2, factor[order], excess.sign()

    def given(self, frozen: Params) -> LowRankNormalPrior:
        r"""The prior of the other parameters once those in ``frozen`` are known.

        .. math:: P_{oo}, \qquad \mu_o - P_{oo}^{-1} P_{of} (\theta_f - \mu_f)
        """
        known = {name: value for name, value in frozen.items() if name in self.layout.names}
        if not known:
            return self
        others = Layout.of({name: self.loc_by_name[name] for name in self.layout.names if name not in known})
        held = Layout.of(known)
        diagonal, factor, signs = self.precision_parts(others)
        _, held_factor, _ = self.precision_parts(held)
        away = held.flatten(known).to(self.loc) - held.flatten(self.loc_by_name)
        shift = factor @ (signs * (held_factor.T @ away))  # the diagonal does not couple the two
        scale = diagonal.rsqrt()
        basis, excess = directions(factor * scale.unsqueeze(1), signs)
        stretch = (1.0 + excess).reciprocal()
        standard = shift * scale
        standard = standard + basis @ ((stretch - 1.0) * (basis.T @ standard))
        loc = others.flatten(self.loc_by_name) - scale * standard
        return LowRankNormalPrior(others, loc, scale, basis, stretch, fixed=self.fixed, buffers=self.buffers)

    def log_det_precision(self) -> Tensor:
        """From the scales and the stretch."""
        return -2.0 * self.scale.log().sum() - self.stretch.log().sum()

    def quadratic(self, params: Params) -> Tensor:
        """(θ - μ)ᵀ P (θ - μ)."""
        standard = (self.layout.flatten(params) - self.loc) / self.scale
        return standard.square().sum() + (standard @ self.basis).square() @ (self.stretch.reciprocal() - 1.0)

    def precision_diagonal(self, layout: Layout) -> Tensor:
        """Diagonal of the precision."""
        diagonal, factor, signs = self.precision_parts(layout)
        return diagonal + factor.square() @ signs

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean and dense precision in the order of ``layout``: for few parameters."""
        diagonal, factor, signs = self.precision_parts(layout)
        return layout.flatten(self.loc_by_name), diagonal.diag() + (factor * signs) @ factor.T

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters."""
        noise = torch.randn(self.loc.shape, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        along = (noise @ self.basis) * (self.stretch.sqrt() - 1.0)
        drawn = self.layout.views(self.loc + self.scale * (noise + self.basis @ along))
        return {name: drawn[name] for name in like}

    def tensors(self) -> dict[str, Tensor]:
        """Scales, directions and stretch."""
        return {"scale": self.scale, "basis": self.basis, "stretch": self.stretch}

    @classmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> LowRankNormalPrior:
        """From scales, directions and stretch."""
        parts = (tensors[part] for part in ("scale", "basis", "stretch"))
        return cls(layout, layout.flatten(loc), *parts, fixed=fixed, buffers=buffers)


def directions(factor: Tensor, signs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Orthonormal Q ``(D, k)`` and e ``(k,)`` with Q diag(e) Qᵀ = F diag(signs) Fᵀ, computed in double precision.

    There are at most D of them, whatever the number of columns of ``factor`` F.
    """
    wide = factor.double()
    basis, triangle = torch.linalg.qr(wide)  # (D, m), (m, k) with m = min(D, k)
    inner = triangle @ triangle.T if signs is None else (triangle * signs.double()) @ triangle.T
    values, vectors = torch.linalg.eigh(inner)
    values = values.clamp_min(0.0) if signs is None else values
    return (basis @ vectors).to(factor.dtype), values.to(factor.dtype)
