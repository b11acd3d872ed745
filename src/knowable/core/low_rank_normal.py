r"""A normal posterior whose covariance is a diagonal and a low-rank part.

.. math:: \Sigma = D^{1/2} \big(I + Q\, \mathrm{diag}(\lambda - 1)\, Q^\top\big) D^{1/2}

with orthonormal columns Q: along them, in units of the diagonal's scales, the variance is λ, and 1 across.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.posterior import Posterior
from knowable.core.types import Params
from knowable.errors import InvalidArgument


class LowRankNormal(Posterior):
    r"""A normal distribution with a diagonal and k directions of their own.

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
        basis, triangle = torch.linalg.qr((factor / scale.unsqueeze(1)).double())
        values, vectors = torch.linalg.eigh(triangle @ triangle.T)
        directions = (basis @ vectors).to(factor.dtype)
        return cls(model, layout, loc, scale, directions, 1.0 + values.clamp_min(0.0).to(factor.dtype), **common)

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        noise = torch.randn((n, len(self.loc)), generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        along = (noise @ self.basis) * (self.stretch.sqrt() - 1.0)
        return self.layout.views(self.loc + self.scale * (noise + along @ self.basis.T))

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

    def _tensors(self) -> dict[str, Tensor]:
        entries = enumerate(zip(self.layout.names, self.layout.shapes, strict=True))
        shapes = {f"shape.{i}.{name}": torch.zeros(shape) for i, (name, shape) in entries}
        return {"loc": self.loc, "scale": self.scale, "basis": self.basis, "stretch": self.stretch, **shapes}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> LowRankNormal:
        keys = sorted((k.split(".", 2) for k in tensors if k.startswith("shape.")), key=lambda parts: int(parts[1]))
        layout = Layout(tuple(parts[2] for parts in keys), tuple(tensors[".".join(parts)].shape for parts in keys))
        return cls(model, layout, *(tensors[part] for part in ("loc", "scale", "basis", "stretch")), **common)
