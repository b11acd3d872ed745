"""Densities with known moments, for samplers: normalised, differentiable, and with exact draws to compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.network.params import Params
from knowable.core.prediction.components import normal_log_prob
from knowable.core.support.checks import check_count, check_number


@dataclass(frozen=True)
class Density:
    """A distribution over one vector, whose truth is known.

    Attributes:
        name: What it is called.
        log_density: Log density of one draw ``{"x": (D,)}``, a scalar.
        draw: ``draw(n, generator)`` gives exact draws ``(n, D)`` in double precision.
        mean: Mean, ``(D,)``.
        covariance: Covariance, ``(D, D)``.
    """

    name: str
    log_density: Callable[[Params], Tensor]
    draw: Callable[[int, torch.Generator], Tensor]
    mean: Tensor
    covariance: Tensor

    def start(self) -> Params:
        """Where a chain may begin: the origin."""
        return {"x": torch.zeros_like(self.mean)}


def correlated_gaussian(d: int = 2, *, correlation: float = 0.9, ratio: float = 10.0) -> Density:
    r"""A normal with equal correlations and scales spread from 1 to ``ratio``.

    .. math:: \Sigma_{ij} = s_i s_j (\rho + (1 - \rho) \delta_{ij})

    Args:
        d: Dimensions.
        correlation: ρ, from 0 to below 1.
        ratio: Largest standard deviation; the smallest is 1.
    """
    check_count("d", d)
    rho = check_number("correlation", correlation, at_least=0, below=1)
    scale = torch.logspace(0, math.log10(check_number("ratio", ratio, above=0)), d, dtype=torch.float64)
    covariance = scale.outer(scale) * (rho + (1 - rho) * torch.eye(d, dtype=torch.float64))
    factor = torch.linalg.cholesky(covariance)
    whiten, log_det = torch.linalg.inv(factor), factor.diagonal().log().sum().item()

    def log_density(params: Params) -> Tensor:
        x = params["x"]
        standard = whiten.to(x) @ x
        return -0.5 * standard.square().sum() - log_det - 0.5 * d * math.log(2 * math.pi)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        return torch.randn((n, d), generator=generator, dtype=torch.float64) @ factor.T

    return Density("correlated gaussian", log_density, draw, torch.zeros(d, dtype=torch.float64), covariance)


def banana(*, curvature: float = 0.5, scale: float = 2.0) -> Density:
    r"""A normal bent along a parabola (Haario et al., 1999): asymmetric, so that it finds errors of sign.

    .. math:: x_1 \sim N(0, s^2), \qquad x_2 \mid x_1 \sim N(b(x_1^2 - s^2), 1)

    Both means are 0 and the two are uncorrelated; Var x₂ = 1 + 2 b² s⁴.

    Args:
        curvature: b.
        scale: s.
    """
    b, s = check_number("curvature", curvature), check_number("scale", scale, above=0)

    def log_density(params: Params) -> Tensor:
        first, second = params["x"][0], params["x"][1]
        return normal_log_prob(first, 0.0, s) + normal_log_prob(second, b * (first**2 - s**2), 1.0)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn((2, n), generator=generator, dtype=torch.float64)
        return torch.stack([s * noise[0], b * s**2 * (noise[0] ** 2 - 1) + noise[1]], dim=1)

    covariance = torch.tensor([s**2, 1 + 2 * b**2 * s**4], dtype=torch.float64).diag()
    return Density("banana", log_density, draw, torch.zeros(2, dtype=torch.float64), covariance)


def bimodal(d: int = 2, *, distance: float = 4.0, weight: float = 0.3) -> Density:
    r"""Two standard normals apart along the first axis, of unequal weight: chains that stay in one mode get it wrong.

    .. math:: w\, N(-\tfrac{a}{2} e_1, I) + (1 - w)\, N(\tfrac{a}{2} e_1, I)

    Args:
        d: Dimensions.
        distance: a, between the modes; beyond 6 or so local moves hardly cross.
        weight: w of the mode on the left.
    """
    check_count("d", d)
    a = check_number("distance", distance, at_least=0)
    w = check_number("weight", weight, above=0, below=1)

    def log_density(params: Params) -> Tensor:
        first, others = params["x"][0], params["x"][1:]
        left = math.log(w) + normal_log_prob(first, -a / 2, 1.0)
        right = math.log(1 - w) + normal_log_prob(first, a / 2, 1.0)
        return torch.logaddexp(left, right) + normal_log_prob(others, 0.0, 1.0).sum()

    def draw(n: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn((n, d), generator=generator, dtype=torch.float64)
        side = torch.where(torch.rand(n, generator=generator, dtype=torch.float64) < w, -a / 2, a / 2)
        noise[:, 0] += side
        return noise

    mean = torch.zeros(d, dtype=torch.float64)
    mean[0] = (0.5 - w) * a
    variance = torch.ones(d, dtype=torch.float64)
    variance[0] = 1 + w * (1 - w) * a**2
    return Density("bimodal", log_density, draw, mean, variance.diag())


def funnel(d: int = 5, *, scale: float = 1.5) -> Density:
    r"""Neal's (2003) funnel: no one step size suits both its neck and its mouth.

    .. math:: v \sim N(0, s^2), \qquad x_i \mid v \sim N(0, e^{v})

    All means are 0 and nothing is correlated; Var xᵢ = exp(s² / 2).

    Args:
        d: Dimensions, of which v is the first.
        scale: s; 3 is the original.
    """
    check_count("d", d, at_least=2)
    s = check_number("scale", scale, above=0)

    def log_density(params: Params) -> Tensor:
        v, others = params["x"][0], params["x"][1:]
        return normal_log_prob(v, 0.0, s) + normal_log_prob(others, 0.0, torch.exp(0.5 * v)).sum()

    def draw(n: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn((n, d), generator=generator, dtype=torch.float64)
        v = s * noise[:, :1]
        return torch.cat([v, torch.exp(0.5 * v) * noise[:, 1:]], dim=1)

    variance = torch.full((d,), math.exp(s**2 / 2), dtype=torch.float64)
    variance[0] = s**2
    return Density("funnel", log_density, draw, torch.zeros(d, dtype=torch.float64), variance.diag())
