"""Noise on the weights of a linear model: the bound in closed form, and its maximum by numerical optimisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize
from torch import Tensor, nn

import knowable as kn
from knowable.priors.log_uniform import divergence_at


@dataclass(frozen=True)
class NoiseRegression:
    r"""Linear regression without a bias, whose weights have noise of variance v.

    .. math:: E[\log p(y \mid X, w)] = -\frac{1}{2 s^2} \Big(\|y - X \theta\|^2 + \sum_d v_d \sum_n x_{nd}^2\Big)
        + \mathrm{const}
    """

    x: Tensor
    y: Tensor
    noise: float

    @classmethod
    def make(cls, seed: int, *, weights: tuple[float, ...] = (1.5, -0.8, 0.4), n: int = 60) -> NoiseRegression:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((n, len(weights)), generator=generator, dtype=torch.float64)
        y = x @ torch.tensor(weights, dtype=torch.float64).unsqueeze(1)
        return cls(x, y + 0.5 * torch.randn(y.shape, generator=generator, dtype=torch.float64), 0.5)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def without_news_from(self, column: int) -> NoiseRegression:
        """The same with an input that is orthogonal to targets and other inputs: it carries nothing."""
        others = torch.cat([self.x[:, [i for i in range(self.x.shape[1]) if i != column]], self.y], dim=1)
        basis = torch.linalg.qr(others).Q
        x = self.x.clone()
        x[:, column] -= basis @ (basis.T @ x[:, column])
        return NoiseRegression(x, self.y, self.noise)

    def model(self, **settings: object) -> kn.Model:
        net = nn.Linear(self.x.shape[1], 1, bias=False).double()
        return kn.Model(net, kn.Gaussian(self.noise), **settings)  # type: ignore[arg-type]

    def expected_log_likelihood(self, theta: Tensor, variance: Tensor) -> float:
        return self._expected_log_likelihood(theta, variance).item()

    def _expected_log_likelihood(self, theta: Tensor, variance: Tensor) -> Tensor:
        error = (self.y.squeeze(1) - self.x @ theta).square().sum()
        spread = (variance * self.x.square().sum(0)).sum()
        constant = len(self.y) * math.log(2 * math.pi * self.noise**2)
        return -0.5 * ((error + spread) / self.noise**2 + constant)

    def bound(self, theta: Tensor, log_alpha: Tensor) -> float:
        """The bound where the noise of each weight is alpha times its square."""
        variance = log_alpha.exp() * theta.square()
        return self.expected_log_likelihood(theta, variance) - divergence_at(log_alpha).sum().item()

    def best_weights(self, alpha: float) -> Tensor:
        """The best means for a set alpha: ridge regression whose penalty is the data's own."""
        gram = self.x.T @ self.x
        return torch.linalg.solve(gram + alpha * gram.diagonal().diag(), self.x.T @ self.y).squeeze(1)

    def best_alpha(self, largest: float) -> float:
        """The best alpha that all weights share."""

        def loss(log_alpha: float) -> float:
            theta = self.best_weights(math.exp(log_alpha))
            return -self.bound(theta, torch.full_like(theta, log_alpha))

        found = optimize.minimize_scalar(loss, bounds=(-12.0, math.log(largest)), method="bounded")
        return math.exp(found.x)

    def best_sparse_bound(self) -> float:
        """The best bound with an alpha of its own for every weight, whichever weights are kept: all are tried."""
        count = self.x.shape[1]
        gram, projected = (self.x.T @ self.x).numpy(), (self.x.T @ self.y).squeeze(1).numpy()

        def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
            at = torch.tensor(flat, requires_grad=True)
            theta, log_scale = at.view(2, count)
            kl = kn.LogUniform().kl_from_normal(theta, log_scale.exp())
            value = kl - self._expected_log_likelihood(theta, (2 * log_scale).exp())
            value.backward()
            assert at.grad is not None
            return value.item(), at.grad.numpy()

        best = math.inf
        for kept in np.ndindex(*[2] * count):
            which = np.flatnonzero(kept)
            theta = np.full(count, 1e-6)
            if len(which):
                theta[which] = np.linalg.solve(gram[np.ix_(which, which)], projected[which])
            start = np.concatenate([theta, np.log(self.noise / np.sqrt(gram.diagonal()))])
            best = min(best, optimize.minimize(loss, start, jac=True, method="L-BFGS-B").fun)
        return -best
