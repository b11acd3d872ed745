"""Posteriors of ordinary statistical models, as bare densities with default settings, against their exact moments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import knowable as kn
from knowable.core.chains.convergence import ess_mean
from knowable.core.chains.posterior import Samples
from tests.inference.sampling.moments import limit

TRACED = kn.Engine(mode="traced")
SAMPLERS = [kn.NUTS(), kn.HMC(), kn.MCLMC()]


def expect_exact(samples: Samples, exact: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Fail unless chains that say they have mixed have means and variances within their standard errors."""
    assert samples.diagnostics.converged
    scores = {}
    for name, (mean, variance) in exact.items():
        draws = samples.draws[name]
        squares = (draws - mean).square()
        error = squares.std((0, 1)) / ess_mean(squares).sqrt() / variance
        scores[f"{name}: mean"] = (draws.mean((0, 1)) - mean) / (variance / ess_mean(draws)).sqrt()
        scores[f"{name}: variance"] = (squares.mean((0, 1)) / variance - 1) / error
    most = limit(sum(each.numel() for each in scores.values()))
    assert all((each.abs() < most).all() for each in scores.values()), (most, scores)


# --- eight schools (Rubin, 1981) -------------------------------------------------------------------------------------

EFFECTS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)


def schools(params):
    """Non-centred, mean ~ N(0, 5²), scale ~ half-Cauchy(5), by its logarithm."""
    mean, log_scale, noise = params["mean"], params["log_scale"], params["noise"]
    effects = mean + log_scale.exp() * noise
    prior = -0.5 * (mean / 5) ** 2 - torch.log1p((log_scale.exp() / 5) ** 2) + log_scale
    return prior - 0.5 * noise.square().sum() - 0.5 * ((EFFECTS - effects) / ERRORS).square().sum()


def exact_schools() -> dict[str, tuple[Tensor, Tensor]]:
    """Given the scale everything is normal; the scale itself by quadrature."""
    log_scale = torch.linspace(-15, 9, 20_001, dtype=torch.float64)
    variance = ERRORS.square() + (2 * log_scale).exp().unsqueeze(-1)  # of each school's effect, given the mean
    precision = 1 / 25 + (1 / variance).sum(-1)
    mean = (EFFECTS / variance).sum(-1) / precision
    density = (
        0.5 * precision * mean.square() - 0.5 * precision.log() - 0.5 * (EFFECTS.square() / variance).sum(-1)
        - 0.5 * variance.log().sum(-1) - torch.log1p((2 * log_scale).exp() / 25) + log_scale
    )  # fmt: skip
    weight = density.softmax(0)

    def moments(centre: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
        average = (weight * centre).sum()
        return average, (weight * (spread + centre.square())).sum() - average.square()

    return {"mean": moments(mean, 1 / precision), "log_scale": moments(log_scale, torch.zeros_like(log_scale))}


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_eight_schools_have_the_moments_of_quadrature(sampler, seed):
    start = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    samples = sampler.sample(schools, start, seed=seed, engine=TRACED)
    expect_exact(samples, exact_schools())
    assert samples.diagnostics["gradients"] < 1e6


SHAPES = {"mean": (), "log_scale": (), "noise": (8,)}


# --- a regression on predictors as they come -------------------------------------------------------------------------


PREDICTORS = {"IQ": (100.0, 15.0), "year": (1983.0, 18.0)}


def raw_regression(centre: float, spread: float, rows: int = 400):
    """Score of a child on its mother's IQ and schooling: an intercept that is all but a multiple of the IQ's weight."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(rows, generator=generator, dtype=torch.float64)

    x = torch.stack(
        [torch.ones(rows, dtype=torch.float64), centre + spread * normal(), (normal() < 0.8).double()], dim=1
    )
    y = x @ torch.tensor([26.0, 0.6, 6.0], dtype=torch.float64) + 18 * normal()

    def log_density(params):  # flat in the weights and in the logarithm of the noise
        residual = (y - x @ params["weights"]) * (-params["log_noise"]).exp()
        return -0.5 * residual.square().sum() - rows * params["log_noise"]

    freedom = rows - x.shape[1]
    inverse = torch.linalg.inv(x.T @ x)
    best = inverse @ x.T @ y
    squares = (y - x @ best).square().sum()
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    log_noise = 0.5 * ((squares / 2).log() - torch.digamma(half)), 0.25 * torch.polygamma(1, half)
    return log_density, {"weights": (best, squares / (freedom - 2) * inverse.diagonal()), "log_noise": log_noise}


@pytest.mark.slow
@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_a_regression_with_raw_predictors_has_its_exact_moments(sampler, predictor, seed):
    # the density falls by 10^6 nats from where the chains begin; widths are from 0.04 to 100, correlations 0.98, 0.9999
    log_density, exact = raw_regression(*PREDICTORS[predictor])
    start = {"weights": torch.zeros(3, dtype=torch.float64), "log_noise": torch.zeros((), dtype=torch.float64)}
    samples = sampler.sample(log_density, start, seed=seed, engine=TRACED)
    expect_exact(samples, exact)
    assert samples.diagnostics["gradients"] < 2e5


def test_the_exact_moments_of_eight_schools_are_those_of_importance_sampling():
    # an independent way to the same numbers: the prior of mean and scale, weighed by the likelihood without the effects
    generator = torch.Generator().manual_seed(0)
    mean = 5 * torch.randn(400_000, generator=generator, dtype=torch.float64)
    scale = 5 * torch.tan(0.5 * math.pi * torch.rand(400_000, generator=generator, dtype=torch.float64))
    variance = ERRORS.square() + scale.square().unsqueeze(-1)
    weight = (-0.5 * ((EFFECTS - mean.unsqueeze(-1)).square() / variance + variance.log()).sum(-1)).softmax(0)
    effective = 1 / weight.square().sum()
    for name, values in (("mean", mean), ("log_scale", scale.log())):
        centre, spread = exact_schools()[name]
        found = (weight * values).sum()
        assert abs(found - centre) < 5 * (spread / effective).sqrt()
        error = ((weight * ((values - centre).square() - spread).square()).sum() / effective).sqrt()
        assert abs((weight * (values - centre).square()).sum() - spread) < 5 * error
