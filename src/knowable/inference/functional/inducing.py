r"""Layers of functions known by their values at inducing points: sparse Gaussian processes, one or several in a row.

Functions g with the kernel k, of which the values at Z are :math:`u = L v` with :math:`L L^\top = K_{ZZ}` and
:math:`v \sim \mathcal{N}(m, S)`, have, with :math:`A = L^{-1} k_Z(x)` (Hensman et al., 2015),

.. math:: g(x) \sim \mathcal{N}\big(m_0(x) + A^\top m,\; k(x, x) - A^\top A + A^\top S A\big), \qquad
    \mathrm{ELBO} = E_q[\log p(D \mid g)] - \mathrm{KL}(\mathcal{N}(m, S) \,\|\, \mathcal{N}(0, I))

With normal noise the best m and S are known in closed form (Titsias, 2009). In a row, each layer takes a draw of the
one before (Salimbeni and Deisenroth, 2017).
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor, nn

from knowable.core.support.cholesky import with_jitter
from knowable.core.support.randomness import derive_seed
from knowable.inference.functional.kernels import Covariance

_JITTER = 1e-8  # of the kernel's size, always added between inducing points, which may come near each other


class InducingLayer(nn.Module):
    """Independent functions with one kernel, known by their whitened values at inducing points.

    Args:
        covariance: The kernel.
        points: Z, ``(M, d)``.
        outputs: Number of functions.
        spread: Standard deviation of the whitened values at first.
        slope: The mean is x times this, ``(d, outputs)``; None: a constant that is learned, first 0.
    """

    def __init__(
        self, covariance: Covariance, points: Tensor, outputs: int, *, spread: float = 1.0, slope: Tensor | None = None
    ):
        super().__init__()
        self.covariance, self.points = covariance, nn.Parameter(points.clone())
        size = len(points)
        rows, columns = torch.tril_indices(size, size)
        self.mean = nn.Parameter(points.new_zeros(outputs, size))
        self.root = nn.Parameter(spread * (rows == columns).to(points).repeat(outputs, 1))  # of S, row by row
        self.slope: Tensor | None
        self.register_buffer("slope", slope)
        self.constant = None if slope is not None else nn.Parameter(points.new_zeros(outputs))
        self._place = rows * size + columns

    @property
    def outputs(self) -> int:
        """Number of functions."""
        return len(self.mean)

    def scale_tril(self) -> Tensor:
        """The root of S, ``(outputs, M, M)``."""
        size = len(self.points)
        flat = self.root.new_zeros(self.outputs, size * size)
        return flat.index_copy(1, self._place.to(flat.device), self.root).view(-1, size, size)

    def set(self, mean: Tensor, scale_tril: Tensor) -> None:
        """Take over m ``(outputs, M)`` and a root of S, ``(outputs, M, M)``."""
        with torch.no_grad():
            self.mean.copy_(mean)
            self.root.copy_(scale_tril.flatten(1)[:, self._place.to(mean.device)])

    def chol(self) -> Tensor:
        """L, with as much jitter as it needs."""
        matrix = self.covariance(self.points)
        size = matrix.detach().diagonal().mean().clamp_min(1e-12)
        unit = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.cholesky(with_jitter(matrix + _JITTER * size * unit)[0])

    def weights(self, x: Tensor) -> Tensor:
        """A ``(..., M, rows)``."""
        return torch.linalg.solve_triangular(self.chol(), self.covariance(self.points, x), upper=False)

    def prior_mean(self, x: Tensor) -> Tensor:
        """m_0 ``(..., rows, outputs)``."""
        return x @ self.slope if self.slope is not None else self.constant.expand(*x.shape[:-1], -1)  # type: ignore[union-attr]

    def marginal(self, x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means and variances ``(rows, outputs)`` at ``x`` ``(rows, d)``."""
        a = self.weights(x) if weights is None else weights
        known = (self.scale_tril().mT @ a).square().sum(1)  # (outputs, rows)
        left = (self.covariance.diagonal(x) - a.square().sum(0)).clamp_min(0.0)
        return self.prior_mean(x) + (self.mean @ a).T, (left + known).T

    def joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., rows, outputs)`` and covariances ``(..., outputs, rows, rows)`` at ``x`` ``(..., rows, d)``."""
        a = self.weights(x)
        known = self.scale_tril().mT @ a.unsqueeze(-3)  # (..., outputs, M, rows)
        left = self.covariance(x) - a.mT @ a
        return self.prior_mean(x) + (self.mean @ a).mT, left.unsqueeze(-3) + known.mT @ known

    def kl(self) -> Tensor:
        """KL(q ‖ p) of the whitened values."""
        root = self.scale_tril()
        log_det = root.diagonal(dim1=1, dim2=2).abs().clamp_min(1e-150).log().sum()
        return 0.5 * (root.square().sum() + self.mean.square().sum() - self.mean.numel()) - log_det


def best_values(precision: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    r"""The best m and root of S where the likelihood is normal.

    .. math:: S = (I + P)^{-1}, \qquad m = S\, b

    Args:
        precision: :math:`P = \sum_n w_n a_n a_n^\top / \sigma^2`, ``(1 or outputs, M, M)``.
        slope: :math:`b = \sum_n w_n a_n y_n / \sigma^2`, ``(outputs, M)``.
    """
    unit = torch.eye(precision.shape[-1], dtype=precision.dtype, device=precision.device)
    covariance = torch.cholesky_inverse(torch.linalg.cholesky(unit + precision)).expand(len(slope), -1, -1)
    mean = (covariance @ slope.unsqueeze(2)).squeeze(2)
    return mean, torch.linalg.cholesky(with_jitter(covariance)[0])


def inducing_points(seen: Tensor, count: int, seed: int) -> Tensor:
    """Centres of clusters of what the kernel sees; all of its different rows, where they are no more than asked for."""
    different = seen.unique(dim=0)
    if len(different) <= count:
        return different
    from scipy.cluster.vq import kmeans2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clusters that end empty: they stay where they were
        rng = np.random.default_rng(derive_seed(seed, "inducing points") % 2**32)
        centres, _ = kmeans2(seen.cpu().numpy(), count, minit="++", seed=rng)  # type: ignore[call-arg]
    return torch.as_tensor(centres).to(seen)
