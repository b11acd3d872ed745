"""Network outputs that are normal: what a network linearised in its weights has under a normal posterior."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormalOutputs:
    """A normal distribution over the outputs of each row, which likelihoods turn into a prediction.

    Attributes:
        mean: Means, ``(batch, ...)``.
        variance: Variances, ``(batch, ...)``.
        covariance: Covariances of each row's flattened outputs, ``(batch, outputs, outputs)``, where they are known.
        draws: Draws of the outputs, ``(K, batch, ...)``.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None
    draws: Tensor

    @property
    def log_weights(self) -> Tensor:
        """Equal weights of the draws, ``(K,)``."""
        return torch.zeros(len(self.draws), dtype=self.mean.dtype, device=self.mean.device).log_softmax(0)

    @classmethod
    def of_moments(cls, mean: Tensor, covariance: Tensor, noise: Tensor) -> NormalOutputs:
        """From means ``(batch, ...)``, covariances and standard normal ``noise`` ``(K, outputs)``.

        All rows use the same noise, so that a row's draws do not depend on the other rows. They have each row's own
        distribution, but not the correlations between rows.
        """
        root = root_of(covariance)
        draws = mean + torch.einsum("boi,ki->kbo", root, noise).view(len(noise), *mean.shape)
        variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape)
        return cls(mean, variance, covariance, draws)


def root_of(covariance: Tensor) -> Tensor:
    """A with A Aᵀ = covariance, for a batch of positive semi-definite matrices ``(..., n, n)``."""
    if covariance.shape[-1] == 1:
        return covariance.clamp_min(0.0).sqrt()
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed.any():
        return factor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0.0).sqrt().unsqueeze(-2)
