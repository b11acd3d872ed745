"""The exact posterior of a linear model, whose predictions are exact too: weights integrated out in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.normal_posterior import FullNormal
from knowable.core.predicting import predict_outputs
from knowable.core.prediction import RegressionPrediction
from knowable.inference.exact.design import Design
from knowable.likelihoods.normal_components import NormalComponents


class LinearNormal(FullNormal):
    r"""A normal posterior over weights in which the network is linear.

    .. math:: p(y \mid x, D) = \mathcal{N}\big(f_0(x) + J(x) m,\; J(x) \Sigma J(x)^\top + \sigma^2\big)
    """

    family = "linear_normal"

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> RegressionPrediction:
        """The exact predictive distribution; ``samples`` functions are drawn as well, for ``prediction.samples``."""
        with torch.no_grad():
            outputs, _, _ = predict_outputs(self, x, samples, seed, memory)
            design = Design(self.model, self.layout, self.buffers)
            pieces = [self._moments(design, part) for part in design.chunks(x)]
            mean = torch.cat([piece[0] for piece in pieces])
            covariance = torch.cat([piece[1] for piece in pieces])  # (rows, outputs, outputs)
        return self._assemble(mean, covariance, outputs)

    def _moments(self, design: Design, x: Tensor) -> tuple[Tensor, Tensor]:
        offset, matrix = design(x)
        spread = matrix @ self.scale_tril.double()
        return offset + matrix @ self.loc.double(), spread @ spread.mT

    def _assemble(self, mean: Tensor, covariance: Tensor, outputs: Tensor) -> RegressionPrediction:
        shape, dtype = outputs.shape[1:], outputs.dtype
        own = self.model.likelihood_params({name: value.unsqueeze(0) for name, value in self.points.items()})
        noise = self.model.likelihood.predict(outputs[:1], own, torch.zeros(1)).components.variance  # type: ignore[attr-defined]
        within = covariance.diagonal(dim1=-2, dim2=-1).reshape(1, *shape)
        total = covariance + noise.double().reshape(len(mean), -1).diag_embed()
        components = CorrelatedNormal(
            mean.reshape(1, *shape).to(dtype), (noise + within.to(dtype)).sqrt(), torch.linalg.cholesky(total).to(dtype)
        )
        log_weights = torch.zeros(1, dtype=dtype, device=mean.device)
        return RegressionPrediction(components, log_weights, within=within.to(dtype), samples=outputs)


@dataclass
class CorrelatedNormal(NormalComponents):
    """Normal components whose outputs are correlated within a row.

    Attributes:
        factor: Cholesky factor of each row's covariance, ``(rows, outputs, outputs)``.
    """

    factor: Tensor

    def log_prob(self, y: Tensor) -> Tensor:
        """Log density of each output given those before it in the row; their sum is the joint log density."""
        difference = (y - self.mean).reshape(*self.factor.shape[:-1], 1)
        standard = torch.linalg.solve_triangular(self.factor, difference, upper=False).squeeze(-1)
        log_scale = self.factor.diagonal(dim1=-2, dim2=-1).log()
        return (-0.5 * standard.square() - log_scale - 0.5 * math.log(2 * math.pi)).reshape(self.mean.shape)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, rows, ...)``; outputs of a row are drawn together."""
        flat = (len(index), *self.factor.shape[:-1], 1)
        noise = torch.randn(flat, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + (self.factor @ noise).reshape(index.shape)
