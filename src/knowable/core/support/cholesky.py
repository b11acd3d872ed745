"""Cholesky factors of covariances that rounding has made singular: so much is added to the diagonal as they need."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.errors import InvalidData

_FIRST, _LAST = 1e-10, 1e-4  # of the mean of the diagonal


def with_jitter(covariance: Tensor, *, most: float = _LAST) -> tuple[Tensor, float]:
    """A symmetric matrix with so much added to its diagonal that it has a Cholesky factor, and how much that was.

    Nothing is added to a matrix that has one; otherwise 1e-10 of the mean of the diagonal, and ten times as much until
    it does.

    Args:
        covariance: Matrices ``(..., n, n)``.
        most: The largest share of the mean of the diagonal that may be added.

    Raises:
        InvalidData: If that is not enough, or the matrix is not finite.
    """
    covariance = (covariance + covariance.mT) / 2
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(1e-12)[..., None, None].detach()
    unit = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    share, found = 0.0, covariance
    while share <= most:
        if not torch.linalg.cholesky_ex(found.detach()).info.any():
            return found, share
        share = share * 10 or _FIRST
        found = covariance + share * size * unit
    if not covariance.isfinite().all():
        raise InvalidData("A covariance of the function is not finite. Standardise x and y, and look for huge values.")
    raise InvalidData(
        f"A covariance of the function at these points has no Cholesky factor, even with {most:g} of its size added to "
        f"the diagonal. Remove rows of x that are nearly the same, compute in double precision, or raise the noise: "
        f"kn.Gaussian(noise=...)."
    )


def cholesky(covariance: Tensor, *, most: float = _LAST) -> tuple[Tensor, float]:
    """The lower Cholesky factor of :func:`with_jitter`, and the share that was added."""
    found, share = with_jitter(covariance, most=most)
    return torch.linalg.cholesky(found), share
