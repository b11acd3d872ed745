"""A network of two weights whose posterior is bent: not normal, and yet known to many digits.

Everything is computed the slow, obvious way, by quadrature in double precision, and shares no code with the methods it
is held against.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from knowable import Gaussian
from knowable.core.model.model import Model
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params

_NODES = 20  # of Gauss-Hermite quadrature in each direction; the log joint is a polynomial of degree 4
_GRID = 4001  # points of the integral over the first weight


@dataclass(frozen=True)
class BananaRegression:
    r"""Some equal rows, explained by a parabola of one weight plus another weight.

    .. math:: y_n = v + k (u - c)^2 + \sigma \xi_n, \qquad u, v \sim N(0, s^2)

    Along the parabola the data does not decide, so the posterior is a banana, and an oblique one: its best normal
    approximation is correlated.

    Attributes:
        y: The observed value, the same in all rows.
        rows: Number of rows N.
        noise: σ of each row.
        curvature: k.
        centre: c.
        prior_scale: s.
    """

    y: float = 1.0
    rows: int = 4
    noise: float = 0.6
    curvature: float = 1.0
    centre: float = -1.0
    prior_scale: float = 1.0

    # --- the same problem as a model ---------------------------------------------------------------------------------

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs, which have no effect, and targets, as a fit takes them."""
        shape = (self.rows, 1)
        return torch.zeros(shape, dtype=torch.float64), torch.full(shape, self.y, dtype=torch.float64)

    def model(self) -> Model:
        """A network with the one parameter ``theta`` = (u, v), which begins at 0."""
        return Model(_Parabola(self.curvature, self.centre), Gaussian(self.noise), Normal(self.prior_scale))

    def as_flat(self, params: Params) -> Tensor:
        """Draws ``{"theta": (..., 2)}`` as vectors."""
        return params["theta"].detach().double()

    # --- exact answers -----------------------------------------------------------------------------------------------

    def log_joint(self, theta: Tensor) -> Tensor:
        """Log p(D, θ) of weights ``(..., 2)``."""
        u, v = theta[..., 0], theta[..., 1]
        residual = self.y - v - self.curvature * (u - self.centre) ** 2
        log_likelihood = self.rows * (-0.5 * (residual / self.noise) ** 2 - _log_constant(self.noise))
        return log_likelihood - 0.5 * (u**2 + v**2) / self.prior_scale**2 - 2 * _log_constant(self.prior_scale)

    @property
    def log_evidence(self) -> float:
        """Log p(D): over v in closed form, over u by the trapezium rule, which is exact for what vanishes at the ends.

        Given u, the mean of the rows is normal around k (u - c)² with variance s² + σ²/N; they do not scatter.
        """
        u = torch.linspace(-12, 12, _GRID, dtype=torch.float64) * self.prior_scale
        spread = math.sqrt(self.prior_scale**2 + self.noise**2 / self.rows)
        mean = self.curvature * (u - self.centre) ** 2
        density = -0.5 * ((self.y - mean) / spread) ** 2 - _log_constant(spread)
        density = density - 0.5 * (u / self.prior_scale) ** 2 - _log_constant(self.prior_scale)
        of_mean = density.logsumexp(0).item() + math.log((u[1] - u[0]).item())
        # from the density of the mean of the rows to that of all rows
        return of_mean - self.rows * _log_constant(self.noise) + _log_constant(self.noise / math.sqrt(self.rows))

    def log_posterior(self, theta: Tensor) -> Tensor:
        """Log p(θ | D) of weights ``(..., 2)``."""
        return self.log_joint(theta) - self.log_evidence

    def elbo(self, loc: Tensor, covariance: Tensor) -> float:
        """The evidence lower bound of a normal, with its expectation by Gauss-Hermite quadrature, which is exact."""
        node, weight = (torch.from_numpy(each) for each in np.polynomial.hermite_e.hermegauss(_NODES))
        noise = torch.cartesian_prod(node, node)  # (nodes², 2)
        weights = torch.cartesian_prod(weight, weight).prod(1) / (2 * math.pi)
        theta = loc.double() + noise @ torch.linalg.cholesky(covariance.double()).T
        entropy = 0.5 * torch.logdet(covariance.double()).item() + math.log(2 * math.pi * math.e)
        return (weights * self.log_joint(theta)).sum().item() + entropy

    def divergence(self, loc: Tensor, covariance: Tensor) -> float:
        """KL from a normal to the posterior: log evidence less bound."""
        return self.log_evidence - self.elbo(loc, covariance)


class _Parabola(nn.Module):
    """The network."""

    def __init__(self, curvature: float, centre: float):
        super().__init__()
        self.curvature, self.centre = curvature, centre
        self.theta = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The same number for every row."""
        first, second = self.theta.unbind()
        return (second + self.curvature * (first - self.centre) ** 2).expand(len(x), 1)


def _log_constant(scale: float) -> float:
    """Log of σ √(2π)."""
    return math.log(scale) + 0.5 * math.log(2 * math.pi)
