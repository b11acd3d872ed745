"""Gaussian posteriors: independent (diagonal) and with a full covariance."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import DiagonalNormalPrior, FullNormalPrior
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument


class DiagonalNormal(Posterior):
    r"""Independent normal distributions: :math:`q(\theta) = \prod_d \mathcal{N}(\theta_d \mid m_d, s_d^2)`.

    Args:
        model: The model.
        loc: Means of the random parameters.
        scale: Their standard deviations.
        common: See :class:`Posterior`.
    """

    family = "diagonal_normal"

    def __init__(self, model: Model, loc: Params, scale: Params, **common: Any):
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.scale = {name: scale[name].detach().clone() for name in self.loc}
        self._layout = Layout.of(self.loc)
        self._flat = self._layout.flatten(self.loc), self._layout.flatten(self.scale)

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        loc, scale = self._flat
        noise = torch.randn((n, len(loc)), generator=generator, dtype=loc.dtype, device=loc.device)
        return self._layout.views(torch.addcmul(loc, scale, noise))

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        return {name: value.clone() for name, value in self.scale.items()}

    def log_alpha(self) -> Params:
        r"""Log of noise over signal of every random parameter, :math:`\log \alpha = \log (s^2 / m^2)`, elementwise.

        Weights above ``log_alpha_threshold`` are drowned in their own noise (Molchanov et al., 2017).
        """
        return {name: 2.0 * (self.scale[name].log() - self.loc[name].abs().log()) for name in self.loc}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        _check_names(self._layout, params)
        loc, scale = self._flat
        standard = (self._layout.flatten(params) - loc) / scale
        return -0.5 * (standard**2).sum(-1) - scale.log().sum() - 0.5 * len(loc) * math.log(2 * math.pi)

    def as_prior(self) -> DiagonalNormalPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        return DiagonalNormalPrior(self.loc, self.scale, fixed=self.points, buffers=self.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        return {f"{part}.{name}": value for part in ("loc", "scale") for name, value in getattr(self, part).items()}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> DiagonalNormal:
        parts = [
            {k.removeprefix(f"{part}."): v for k, v in tensors.items() if k.startswith(f"{part}.")}
            for part in ("loc", "scale")
        ]
        return cls(model, *parts, **common)


class FullNormal(Posterior):
    r"""A normal distribution with a full covariance: :math:`q(\theta) = \mathcal{N}(\theta \mid m, L L^\top)`.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale_tril: Lower Cholesky factor L of the covariance, ``(D, D)``.
        common: See :class:`Posterior`.
    """

    family = "full_normal"

    def __init__(self, model: Model, layout: Layout, loc: Tensor, scale_tril: Tensor, **common: Any):
        super().__init__(model, **common)
        self.layout = layout
        self.loc, self.scale_tril = loc.detach().clone(), scale_tril.detach().contiguous().clone()

    @property
    def covariance(self) -> Tensor:
        """Covariance of the flat random parameters, ``(D, D)``, in the order of ``layout``."""
        return self.scale_tril @ self.scale_tril.T

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        noise = torch.randn((n, len(self.loc)), generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.layout.views(self.loc + noise @ self.scale_tril.T)

    def _mean_random(self) -> Params:
        return self.layout.views(self.loc.clone())

    def _std_random(self) -> Params:
        return self.layout.views(self.scale_tril.square().sum(-1).sqrt())

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        _check_names(self.layout, params)
        difference = (self.layout.flatten(params) - self.loc).unsqueeze(-1)
        standard = torch.linalg.solve_triangular(self.scale_tril, difference, upper=False).squeeze(-1)
        log_det = self.scale_tril.diagonal().log().sum()
        return -0.5 * (standard**2).sum(-1) - log_det - 0.5 * len(self.loc) * math.log(2 * math.pi)

    def as_prior(self) -> FullNormalPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        return FullNormalPrior(self.layout, self.loc, self.scale_tril, fixed=self.points, buffers=self.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        shapes = {f"shape.{i}.{name}": torch.zeros(shape) for i, (name, shape) in enumerate(self._entries())}
        return {"loc": self.loc, "scale_tril": self.scale_tril, **shapes}

    def _entries(self) -> list[tuple[str, torch.Size]]:
        return list(zip(self.layout.names, self.layout.shapes, strict=True))

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> FullNormal:
        entries = sorted((k.split(".", 2) for k in tensors if k.startswith("shape.")), key=lambda parts: int(parts[1]))
        names = tuple(parts[2] for parts in entries)
        shapes = tuple(tensors[".".join(parts)].shape for parts in entries)
        return cls(model, Layout(names, shapes), tensors["loc"], tensors["scale_tril"], **common)


def _check_names(layout: Layout, params: Params) -> None:
    lacking = [name for name in layout.names if name not in params]
    if lacking:
        raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")
