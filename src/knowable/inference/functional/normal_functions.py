r"""The algebra of functions that are a Gaussian process, seen through targets that say something of each value.

Targets that have information W about function values (the inverse variance of noise, or minus the second derivatives of
a log likelihood) leave them, at new inputs with covariances k to the old ones, the variance

.. math:: k_{**} - k^\top S k, \qquad S = (K + W^{-1})^{-1}

Outputs have the same covariance K. Their information is independent, D, or that of labels,
:math:`W = D - D R\, \mathrm{diag}(1/w) R^\top D` with D = w π and R the sum over classes, for which (Rasmussen and
Williams, 2006, chapter 3)

.. math:: S = E - E R\, (R^\top E R)^{-1} R^\top E, \qquad E = (K + D^{-1})^{-1}

Everything is differentiable in K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.support.cholesky import cholesky
from knowable.errors import Diverged, InvalidArgument, InvalidData

_STEPS = 100  # of Newton's method, which takes some ten
_HALVINGS = 20  # of one of its steps
_SETTLED = 1e-10  # change of the objective, relative to its size


@dataclass(frozen=True)
class Information:
    """What targets say of function values: D ``(outputs, N)``, or ``(1, N)`` where all outputs are alike."""

    values: Tensor
    labels: bool = False  # whether outputs are logits of one label, so that W is not diagonal

    def times(self, f: Tensor) -> Tensor:
        """W times ``f`` ``(outputs, N)``."""
        found = self.values * f
        if not self.labels:
            return found
        total = self.values.sum(0)  # w
        return found - self.values * found.sum(0) / total


class Factors:
    """S and the determinant of I + K W, from Cholesky factors.

    Args:
        kernel: K, ``(N, N)``.
        information: W, positive in every row.
    """

    def __init__(self, kernel: Tensor, information: Information):
        self.labels = information.labels
        self.root = information.values.sqrt()
        unit = torch.eye(len(kernel), dtype=kernel.dtype, device=kernel.device)
        inner = unit + self.root.unsqueeze(2) * kernel * self.root.unsqueeze(1)  # (outputs, N, N)
        self.chol, self.jitter = _cholesky(inner)  # jitter: the share of its size that was added
        self.log_det = 2 * self.chol.diagonal(dim1=1, dim2=2).log().sum(1)  # of each output
        if self.labels:
            self.sum_chol, _ = _cholesky(self.inverse().sum(0))
            weights = information.values.sum(0)
            self.label_log_det = 2 * self.sum_chol.diagonal().log().sum() - weights.log().sum()

    def inverse(self) -> Tensor:
        """E as matrices ``(outputs, N, N)``."""
        return self.root.unsqueeze(2) * torch.cholesky_inverse(self.chol) * self.root.unsqueeze(1)

    def whitened(self, values: Tensor) -> Tensor:
        """A with Aᵀ A = vᵀ E v, for v ``(outputs, N, k)``."""
        return torch.linalg.solve_triangular(self.chol, self.root.unsqueeze(2) * values, upper=False)

    def times(self, values: Tensor) -> Tensor:
        """E times values ``(outputs, N, k)``."""
        return self.root.unsqueeze(2) * torch.cholesky_solve(self.root.unsqueeze(2) * values, self.chol)

    def solve(self, values: Tensor) -> Tensor:
        """S times values ``(outputs, N)``."""
        found = self.times(values.unsqueeze(2)).squeeze(2)
        if not self.labels:
            return found
        shared = torch.cholesky_solve(found.sum(0).unsqueeze(1), self.sum_chol)
        return found - self.times(shared.expand(len(found), -1, -1)).squeeze(2)

    def total_log_det(self, outputs: int) -> Tensor:
        """Log det(I + K W) of all outputs."""
        own = self.log_det.sum() if len(self.log_det) == outputs else outputs * self.log_det.sum()
        return own + self.label_log_det if self.labels else own


def _cholesky(matrix: Tensor) -> tuple[Tensor, float]:
    """The factor, of the matrix with as much added to its diagonal as it needs, and what share of its size that was.

    It needs some where the noise is below the rounding of the kernel.
    """
    found, failed = torch.linalg.cholesky_ex(matrix)
    if not failed.any():
        return found, 0.0
    try:
        return cholesky(matrix)
    except InvalidData:
        raise InvalidArgument(
            "The kernel has no Cholesky factor at these inputs, even with a ten-thousandth of its size added to the "
            "diagonal: its values are not finite, or very large beside the noise. Standardise the inputs, remove rows "
            "that are nearly the same, or raise a fixed noise: kn.Gaussian(noise=...). Of an infinitely wide network, "
            "give weights a smaller prior scale (1/√n for a layer that sums over n units)."
        ) from None


class Conditioned:
    r"""Functions with a kernel, after targets have said something of their values at the points ``x``.

    .. math:: m(x) = k(x)^\top a, \qquad v(x) = k(x, x) - k(x)^\top S\, k(x)

    Args:
        between: The kernel of two sets of points.
        diagonal: The kernel of each point with itself.
        x: Points of the training rows.
        slope: a, ``(outputs, N)``.
        information: What the targets say of the function values there, which gives S.
    """

    def __init__(
        self, between: Callable[[Tensor, Tensor], Tensor], diagonal: Callable[[Tensor], Tensor], x: Tensor,
        slope: Tensor, information: Information,
    ):  # fmt: skip
        self.between, self.diagonal, self.x, self.slope = between, diagonal, x, slope
        self.information = information
        self.factors = Factors(between(x, x), information)

    def marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(rows, outputs)``, and each row's covariance ``(rows, outputs, outputs)`` between its outputs."""
        mean, whitened, shared = self._seen(x)
        left = (self.diagonal(x) - whitened.square().sum(1)).clamp_min(0.0)  # (1 or outputs, rows)
        covariance = left.expand(len(mean.T), -1).T.diag_embed()
        if shared is not None:
            covariance = covariance + torch.einsum("onm,pnm->mop", shared, shared)
        return mean, covariance

    def joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., rows, outputs)``, and the covariance ``(..., outputs, rows, rows)`` of each output's values.

        Outputs that are logits of one label are not independent: their covariance is ``(1, n, n)``, of n = outputs x
        rows values, those of the first output first.
        """
        mean, whitened, shared = self._seen(x)
        left = self.between(x, x).unsqueeze(-3) - whitened.mT @ whitened  # (..., 1 or outputs, rows, rows)
        outputs = mean.shape[-1]
        left = left.expand(*left.shape[:-3], outputs, -1, -1)
        if shared is None:
            return mean, left
        total = torch.einsum("onm,pnl->ompl", shared, shared)
        for output in range(outputs):
            total[output, :, output] += left[output]
        size = outputs * len(x)
        return mean, total.reshape(1, size, size)

    def _seen(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Means ``(..., rows, outputs)``, and the roots of kᵀ E k and of the part that outputs of labels share."""
        cross = self.between(self.x, x)  # (..., N, rows)
        factors = self.factors
        stack = cross.unsqueeze(-3).expand(*cross.shape[:-2], len(factors.root), -1, -1)
        mean, whitened = (self.slope @ cross).mT, factors.whitened(stack)
        if not factors.labels:
            return mean, whitened, None
        return mean, whitened, torch.linalg.solve_triangular(factors.sum_chol, factors.times(stack), upper=False)


# --- normal noise ----------------------------------------------------------------------------------------------------


def normal_evidence(kernel: Tensor, y: Tensor, noise: Tensor, weights: Tensor) -> Tensor:
    r"""The log evidence of targets with normal noise, whose likelihood is raised to the weights of the rows.

    .. math:: \sum_o \log \mathcal{N}(y_o \mid 0, K + \sigma^2 \mathrm{diag}(1/w))
        + \sum_{o,n} \tfrac12 \log \tfrac{2\pi\sigma^2}{w_n} - \tfrac{w_n}{2} \log 2\pi\sigma^2

    Args:
        kernel: K, ``(N, N)``.
        y: Targets ``(outputs, N)``.
        noise: Variances σ², ``(outputs, 1)``, or ``(1, 1)`` for all.
        weights: ``(N,)``.
    """
    factors = Factors(kernel, Information(weights / noise))
    fit = (y * factors.solve(y)).sum()
    scale = (weights.sum() * (2 * math.pi * noise).log()).sum() * (len(y) / len(noise))
    return -0.5 * (fit + factors.total_log_det(len(y)) + scale)


def left_out(kernel: Tensor, y: Tensor, noise: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean ``(outputs, N)`` and variance ``(1, N)`` of each row's function values given all other rows.

    .. math:: m_n = y_n - \frac{[S y]_n}{S_{nn}}, \qquad v_n = \frac{1}{S_{nn}} - \frac{\sigma^2}{w_n}
    """
    factors = Factors(kernel, Information(weights / noise))
    own = factors.inverse().diagonal(dim1=1, dim2=2)
    return y - factors.solve(y) / own, (1 / own - noise / weights).clamp_min(0.0)


# --- Laplace's approximation -----------------------------------------------------------------------------------------

Score = Callable[[Tensor], Tensor]
"""The log likelihood of function values ``(outputs, N)``: one number."""
Curvature = Callable[[Tensor], Information]
"""Minus the second derivatives of the log likelihood at function values."""


@dataclass(frozen=True)
class Mode:
    """The most probable function values."""

    values: Tensor  # f, (outputs, N)
    slope: Tensor  # K⁻¹ f: the gradient of the log likelihood
    steps: int
    settled: bool


def most_probable_functions(kernel: Tensor, score: Score, curvature: Curvature, start: Tensor) -> Mode:
    """Newton's method for the mode of log p(y | f) - ½ fᵀ K⁻¹ f, with steps halved until it rises."""
    kernel, slope = kernel.detach(), torch.zeros_like(start)
    value = _objective(kernel, score, slope)
    for step in range(_STEPS):
        target = newton_step(kernel, score, curvature, slope @ kernel)
        size, new, found = 1.0, target, _objective(kernel, score, target)
        for _ in range(_HALVINGS):
            if found >= value:
                break
            size /= 2
            new = slope + size * (target - slope)
            found = _objective(kernel, score, new)
        if not math.isfinite(found):
            raise Diverged("The most probable function has no finite log likelihood. Standardise x and y.")
        gained, slope, value = found - value, new, max(found, value)
        if gained <= _SETTLED * (1 + abs(value)):
            return Mode(slope @ kernel, slope, step + 1, True)
    return Mode(slope @ kernel, slope, _STEPS, False)


def _objective(kernel: Tensor, score: Score, slope: Tensor) -> float:
    with torch.no_grad():
        f = slope @ kernel
        return float(score(f) - 0.5 * (slope * f).sum())


def newton_step(kernel: Tensor, score: Score, curvature: Curvature, f: Tensor) -> Tensor:
    """K⁻¹ f after one step of Newton's method from f ``(outputs, N)``."""
    information = curvature(f)
    with torch.enable_grad():
        leaf = f.detach().requires_grad_()
        gradient = torch.autograd.grad(score(leaf), leaf)[0]
    b = information.times(f) + gradient
    return b - Factors(kernel, information).solve(b @ kernel)


def laplace_evidence(kernel: Tensor, score: Score, curvature: Curvature, mode: Tensor) -> Tensor:
    r"""The log evidence by Laplace's method, differentiable in K: also through the mode, which depends on it.

    .. math:: \log p(y \mid \hat f) - \tfrac12 \hat f^\top K^{-1} \hat f - \tfrac12 \log \det(I + K W)

    A step of Newton's method from the mode stays there, and has the mode's own derivative.
    """
    slope = newton_step(kernel, score, curvature, mode.detach())
    f = slope @ kernel
    factors = Factors(kernel, curvature(f))
    return score(f) - 0.5 * (slope * f).sum() - 0.5 * factors.total_log_det(len(f))
