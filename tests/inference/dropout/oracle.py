"""What is known in closed form about dropout on a linear model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.integrate
import scipy.optimize
import torch
from torch import Tensor, nn

import knowable as kn


@dataclass(frozen=True)
class DropoutRegression:
    r"""Linear regression ``y = X m + b`` with known noise, whose inputs are dropped at rate p (but not the bias).

    With r = p / (1 - p), the variance of a mask over its squared mean (Wager, Wang and Liang, 2013):

    .. math:: E\|y - X \operatorname{diag}(z / (1-p))\, m - b\|^2 = \|y - X m - b\|^2 + r \sum_j m_j^2 \sum_n x_{nj}^2

    so the bound is quadratic in the mean weights, and its maximum a ridge regression with a penalty for each input.
    """

    x: Tensor  # (n, d), double
    y: Tensor  # (n, 1)
    noise: float
    prior_scale: float

    @classmethod
    def make(
        cls, seed: int, n: int = 40, *, weights: tuple[float, ...] = (1.0, -0.7, 0.4), noise: float = 0.7
    ) -> DropoutRegression:
        """Residuals are orthogonal to the inputs, so that least squares finds exactly ``weights`` and a bias of 0.3."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((n, len(weights)), generator=generator, dtype=torch.float64)
        design = torch.cat([x, torch.ones(n, 1, dtype=torch.float64)], 1)
        residual = noise * torch.randn((n, 1), generator=generator, dtype=torch.float64)
        residual = residual - design @ torch.linalg.lstsq(design, residual).solution
        return cls(x, x @ torch.tensor(weights, dtype=torch.float64).unsqueeze(1) + 0.3 + residual, noise, 1.0)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def model(self) -> kn.Model:
        """The same as a model."""
        net = nn.Linear(self.x.shape[1], 1).double()
        return kn.Model(net, kn.Gaussian(self.noise), kn.Normal(self.prior_scale))

    @property
    def squares(self) -> Tensor:
        """Σ_n x_nj² of each input, ``(d,)``."""
        return self.x.square().sum(0)

    def bound(self, weight: Tensor, bias: Tensor, rate: float) -> float:
        """The evidence lower bound, up to the constant of the narrow normals."""
        moments = (1.0, rate / (1 - rate))
        return self.expected_log_likelihood(weight, bias, *moments) - self.divergence(weight, bias, rate)

    def expected_log_likelihood(self, weight: Tensor, bias: Tensor, mean: float, variance: float) -> float:
        """For factors on the inputs of any given mean and variance: 1 and r for hard masks."""
        weight, bias = weight.flatten(), bias.flatten()
        residual = self.y.squeeze(1) - mean * self.x @ weight - bias
        squares = residual.square().sum() + variance * (weight.square() * self.squares).sum()
        n = len(self.y)
        return -0.5 * squares.item() / self.noise**2 - n * math.log(self.noise) - 0.5 * n * math.log(2 * math.pi)

    def divergence(self, weight: Tensor, bias: Tensor, rate: float) -> float:
        """The cross-entropy with the prior less the entropy of the masks."""
        entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
        quadratic = weight.square().sum() / (1 - rate) + bias.square().sum()
        count = weight.numel() + bias.numel()
        constant = count * (math.log(self.prior_scale) + 0.5 * math.log(2 * math.pi))
        return 0.5 * quadratic.item() / self.prior_scale**2 + constant - weight.numel() * entropy

    def best_weights(self, rate: float) -> tuple[Tensor, Tensor]:
        """Where the bound is highest at a given rate: weights and bias."""
        return self._ridge(1.0, rate / (1 - rate), rate)

    def _ridge(self, mean: float, variance: float, rate: float) -> tuple[Tensor, Tensor]:
        design = torch.cat([mean * self.x, torch.ones(len(self.x), 1, dtype=torch.float64)], 1)
        ridge = variance * self.squares / self.noise**2 + 1 / (self.prior_scale**2 * (1 - rate))
        ridge = torch.cat([ridge, torch.tensor([1 / self.prior_scale**2], dtype=torch.float64)])
        system = design.T @ design / self.noise**2 + ridge.diag()
        found = torch.linalg.solve(system, design.T @ self.y / self.noise**2)
        return found[:-1].T, found[-1]

    def best_rate(self, relaxation: float | None = None) -> float:
        """The rate at which the bound, maximised over the weights, is highest; with hard or with relaxed masks."""

        def loss(logit: float) -> float:
            rate = 1 / (1 + math.exp(-logit))
            moments = (1.0, rate / (1 - rate)) if relaxation is None else relaxed_moments(rate, relaxation)
            weight, bias = self._ridge(*moments, rate)
            return self.divergence(weight, bias, rate) - self.expected_log_likelihood(weight, bias, *moments)

        found = scipy.optimize.minimize_scalar(loss, bounds=(-12.0, 3.0), method="bounded", options={"xatol": 1e-6})
        return 1 / (1 + math.exp(-found.x))


def relaxed_moments(rate: float, relaxation: float) -> tuple[float, float]:
    """Mean and variance of z̃ / (1 - p), for a relaxed mask z̃, by integration over its logistic noise."""
    shift = math.log((1 - rate) / rate)

    def integrate(power: int) -> float:
        def integrand(u: float) -> float:
            argument = (shift + math.log(u / (1 - u))) / relaxation
            return (1 / (1 + np.exp(-np.clip(argument, -700, 700)))) ** power

        return scipy.integrate.quad(integrand, 0, 1, points=[rate], limit=200, epsabs=1e-10)[0]

    mean = integrate(1)
    return mean / (1 - rate), (integrate(2) - mean**2) / (1 - rate) ** 2
