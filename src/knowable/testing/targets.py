"""A regression problem whose answers are all known: posterior, evidence, prediction, and the mean-field optimum.

The answers are computed the slow, obvious way (dense matrices in double precision, the evidence as the log density of
the targets themselves), so that they share no code with the methods they are held against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from knowable import Gaussian
from knowable.core.model.model import Model
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.randomness import own_randomness


@dataclass(frozen=True)
class LinearGaussian:
    r"""Bayesian linear regression with known noise.

    .. math:: y = X\theta + \sigma\xi, \quad \theta \sim N(0, s^2 I), \qquad
        P = \tfrac{1}{s^2} I + \tfrac{1}{\sigma^2} X^\top X, \quad m = \tfrac{1}{\sigma^2} P^{-1} X^\top y

    The last column of X is one: flat vectors hold the weights in the order of the features, then the bias.

    Attributes:
        x: Inputs, ``(n, d)``, without the column of ones.
        y: Targets, ``(n, 1)``.
        noise: Standard deviation of the noise σ.
        prior_scale: Standard deviation s of the prior on every weight.
    """

    x: Tensor
    y: Tensor
    noise: float
    prior_scale: float

    @classmethod
    def make(
        cls,
        n: int = 60,
        d: int = 3,
        *,
        noise: float = 0.5,
        seed: int = 0,
        prior_scale: float = 1.0,
        correlation: float = 0.5,
        dtype: torch.dtype = torch.float64,
    ) -> LinearGaussian:
        """Draw a problem from its own model.

        Args:
            n: Rows.
            d: Features.
            noise: Standard deviation of the noise.
            seed: The same seed gives the same problem.
            prior_scale: Standard deviation of the weights, and of the prior on them.
            correlation: Between any two features; it is what makes the mean-field answer differ from the exact one.
            dtype: Of the data and of the model's network.
        """
        check_count("n", n)
        check_count("d", d)
        check_number("noise", noise, above=0)
        check_number("prior_scale", prior_scale, above=0)
        check_number("correlation", correlation, at_least=0, below=1)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        x = math.sqrt(1 - correlation) * normal(n, d) + math.sqrt(correlation) * normal(n, 1)
        theta = prior_scale * normal(d + 1)
        y = x @ theta[:-1] + theta[-1] + noise * normal(n)
        return cls(x.to(dtype), y.unsqueeze(1).to(dtype), noise, prior_scale)

    # --- the same problem as a model ---------------------------------------------------------------------------------

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, as a fit takes them."""
        return self.x, self.y

    def model(self, *, seed: int = 0) -> Model:
        """``nn.Linear(d, 1)`` with this problem's noise and prior; ``seed`` fixes the network's first weights."""
        with own_randomness(seed):
            net = nn.Linear(self.x.shape[1], 1).to(self.x.dtype)
        return Model(net, Gaussian(self.noise), Normal(self.prior_scale))

    def as_params(self, flat: Tensor) -> Params:
        """A flat vector ``(..., d + 1)`` as the parameters of the model's network."""
        flat = flat.to(self.x.dtype)
        return {"weight": flat[..., :-1].unsqueeze(-2), "bias": flat[..., -1:]}

    def as_flat(self, params: Params) -> Tensor:
        """Parameters of the model's network as a flat vector in double precision, the inverse of :meth:`as_params`."""
        return torch.cat([params["weight"].squeeze(-2), params["bias"]], dim=-1).detach().double()

    # --- exact answers -----------------------------------------------------------------------------------------------

    @property
    def design(self) -> Tensor:
        """X with its column of ones, ``(n, d + 1)``."""
        return _with_ones(self.x)

    @property
    def precision(self) -> Tensor:
        """Posterior precision, ``(d + 1, d + 1)``."""
        design = self.design
        return torch.eye(design.shape[1], dtype=torch.float64) / self.prior_scale**2 + design.T @ design / self.noise**2

    @property
    def covariance(self) -> Tensor:
        """Posterior covariance."""
        return torch.linalg.inv(self.precision)

    @property
    def mean(self) -> Tensor:
        """Posterior mean, ``(d + 1,)``."""
        return self.covariance @ self.design.T @ self.y.double().squeeze(1) / self.noise**2

    @property
    def log_evidence(self) -> float:
        r"""Log density of the targets without the weights: :math:`\log N(y \mid 0, s^2 X X^\top + \sigma^2 I)`."""
        design = self.design
        covariance = self.prior_scale**2 * design @ design.T + self.noise**2 * torch.eye(
            len(design), dtype=torch.float64
        )
        marginal = torch.distributions.MultivariateNormal(torch.zeros_like(covariance[0]), covariance)
        return marginal.log_prob(self.y.double().squeeze(1)).item()

    def predictive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the outcome at new inputs ``(rows, d)``, each ``(rows,)``."""
        design = _with_ones(x)
        variance = (design @ self.covariance * design).sum(1) + self.noise**2
        return design @ self.mean, variance.sqrt()

    # --- the mean-field approximation --------------------------------------------------------------------------------

    @property
    def mean_field_std(self) -> Tensor:
        r"""Standard deviations of the best independent normals, :math:`P_{dd}^{-1/2}`; their means are exact."""
        return self.precision.diagonal().rsqrt()

    def divergence(self, loc: Tensor, std: Tensor) -> float:
        r"""KL from independent normals to the posterior.

        .. math:: \tfrac12\Big(\sum_d P_{dd} s_d^2 + (\mu - m)^\top P (\mu - m) - D - \log\det P\Big) - \sum_d \log s_d
        """
        precision, difference = self.precision, loc.double() - self.mean
        quadratic = (precision.diagonal() * std.double() ** 2).sum() + difference @ precision @ difference
        log_ratio = torch.logdet(precision) + 2 * std.double().log().sum()
        return 0.5 * (quadratic - len(difference) - log_ratio).item()

    def elbo(self, loc: Tensor | None = None, std: Tensor | None = None) -> float:
        """The evidence lower bound of independent normals (by default the best): log evidence less the divergence."""
        loc = self.mean if loc is None else loc
        std = self.mean_field_std if std is None else std
        return self.log_evidence - self.divergence(loc, std)

    def tempered(self, beta: float) -> LinearGaussian:
        r"""The problem whose posterior is the optimum when the KL is multiplied by ``beta``.

        .. math:: E_q[\log p(y \mid \theta)] - \beta\,\mathrm{KL}
            = \beta\big(E_q[\log p(y \mid \theta)^{1/\beta}] - \mathrm{KL}\big)

        and a normal density raised to 1/β is one whose variance is β times as large.
        """
        return replace(self, noise=self.noise * math.sqrt(beta))


def _with_ones(x: Tensor) -> Tensor:
    return torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64)], dim=1)
