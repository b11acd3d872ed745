"""Gaussian conditioning in data space: the other way to the same answers, with nothing shared but the design matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conditioned:
    """θ ~ N(m0, S0) given y = J θ + noise, as the joint normal of (θ, y) says."""

    design: Tensor  # (rows, D)
    y: Tensor  # (rows,)
    noise: Tensor  # (rows,) standard deviations
    prior_mean: Tensor  # (D,)
    prior_std: Tensor  # (D,)

    @property
    def marginal(self) -> torch.distributions.MultivariateNormal:
        spread = self.design * self.prior_std
        return torch.distributions.MultivariateNormal(
            self.design @ self.prior_mean, spread @ spread.T + self.noise.square().diag()
        )

    @property
    def gain(self) -> Tensor:
        return self.prior_std.square().diag() @ self.design.T @ torch.linalg.inv(self.marginal.covariance_matrix)

    @property
    def mean(self) -> Tensor:
        return self.prior_mean + self.gain @ (self.y - self.marginal.loc)

    @property
    def covariance(self) -> Tensor:
        prior = self.prior_std.square().diag()
        return prior - self.gain @ self.design @ prior

    @property
    def log_evidence(self) -> float:
        return self.marginal.log_prob(self.y).item()


def linear_layer_design(features: Tensor, outputs: int) -> Tensor:
    """J of ``nn.Linear(d, outputs)`` for the flat ``[weight, bias]``, rows in the order of ``output.flatten()``."""
    rows, d = features.shape
    eye = torch.eye(outputs, dtype=features.dtype)
    by_weight = torch.einsum("nd,op->nopd", features, eye).reshape(rows * outputs, outputs * d)
    return torch.cat([by_weight, eye.repeat(rows, 1)], dim=1)
