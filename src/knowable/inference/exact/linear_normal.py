"""The exact posterior of a linear model, whose predictions are exact too: weights integrated out in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.normal_outputs import NormalOutputs
from knowable.core.normal_posterior import FullNormal
from knowable.core.predicting import predict_outputs
from knowable.core.prediction import Prediction
from knowable.inference.exact.design import Design


class LinearNormal(FullNormal):
    r"""A normal posterior over weights in which the network is linear.

    .. math:: p(y \mid x, D) = \mathcal{N}\big(f_0(x) + J(x) m,\; J(x) \Sigma J(x)^\top + \sigma^2\big)
    """

    family = "linear_normal"

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        """The exact predictive distribution; ``samples`` functions are drawn as well, for ``prediction.samples``."""
        with torch.no_grad():
            draws, _, _ = predict_outputs(self, x, samples, seed, memory)
            design = Design(self.model, self.layout, self.buffers)
            pieces = [self._moments(design, part) for part in design.chunks(x)]
            shape, dtype = draws.shape[1:], draws.dtype
            mean = torch.cat([piece[0] for piece in pieces]).reshape(shape).to(dtype)
            covariance = torch.cat([piece[1] for piece in pieces])  # (rows, outputs, outputs)
            variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(shape).to(dtype)
            own = self.model.likelihood_params(self.points)
            return self.model.likelihood.predict_normal(NormalOutputs(mean, variance, covariance, draws), own)

    def _moments(self, design: Design, x: Tensor) -> tuple[Tensor, Tensor]:
        offset, matrix = design(x)
        spread = matrix @ self.scale_tril.double()
        return offset + matrix @ self.loc.double(), spread @ spread.mT
