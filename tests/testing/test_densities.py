from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

import knowable as kn
from knowable.testing import Density, banana, correlated_gaussian, funnel
from knowable.testing.densities import bimodal

DENSITIES = {
    "gaussian": lambda: correlated_gaussian(2, correlation=0.8, ratio=3.0),
    "banana": lambda: banana(curvature=0.5, scale=1.2),
    "funnel": lambda: funnel(2, scale=1.0),
    "bimodal": lambda: bimodal(2, distance=5.0, weight=0.2),
}


@pytest.fixture(params=DENSITIES)
def density(request) -> Density:
    return DENSITIES[request.param]()


def on_a_grid(density: Density, half_width: float, points: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Points ``(n, 2)``, densities there, and the area of a cell."""
    line = torch.linspace(-half_width, half_width, points, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    log_density = torch.func.vmap(lambda x: density.log_density({"x": x}))(grid)
    return grid, log_density.exp(), (line[1] - line[0]).item() ** 2


def test_density_integrates_to_one_with_the_stated_moments(density):
    # a midpoint sum over [-30, 30]²; the funnel has a part of about 1e-3 of its mass outside or between the points
    grid, values, cell = on_a_grid(density, 30.0, 1201)
    mass = values.sum().item() * cell
    mean = (values.unsqueeze(1) * grid).sum(0) * cell
    away = grid - density.mean
    covariance = torch.einsum("n,ni,nj->ij", values, away, away) * cell
    loose = density.name == "funnel"
    assert mass == pytest.approx(1.0, abs=5e-3 if loose else 1e-6)
    torch.testing.assert_close(mean, density.mean, rtol=0, atol=1e-2 if loose else 1e-5)
    torch.testing.assert_close(covariance, density.covariance, rtol=2e-2 if loose else 1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "density", [correlated_gaussian(3), banana(), funnel(3, scale=0.8), bimodal(3)], ids=lambda density: density.name
)
def test_exact_draws_have_the_stated_moments(density, generator):
    # S draws: means within 4.5 sqrt(v / S), and second moments within 4.5 of their own estimated standard errors
    draws = density.draw(20_000, generator)
    error = (density.covariance.diagonal() / len(draws)).sqrt()
    assert ((draws.mean(0) - density.mean).abs() < 4.5 * error).all()
    away = draws - density.mean
    products = away.unsqueeze(2) * away.unsqueeze(1)
    error = products.std(0) / math.sqrt(len(draws))
    assert ((products.mean(0) - density.covariance).abs() < 4.5 * error).all()


def test_gaussian_is_the_multivariate_normal(generator):
    density = correlated_gaussian(4, correlation=0.6, ratio=5.0)
    normal = scipy.stats.multivariate_normal(density.mean.numpy(), density.covariance.numpy())
    for x in density.draw(5, generator):
        assert density.log_density({"x": x}).item() == pytest.approx(normal.logpdf(x.numpy()), rel=1e-9)
    np.testing.assert_allclose(density.covariance.diagonal().sqrt(), np.logspace(0, np.log10(5), 4))
    assert torch.allclose(density.covariance[0, 3], torch.tensor(0.6 * 1.0 * 5.0, dtype=torch.float64))


def test_draws_and_density_agree(density, generator):
    # E[∇ log p] = 0 under p (for densities that vanish at infinity): within 4.5 standard errors
    draws = density.draw(4000, generator)
    scores = torch.func.vmap(torch.func.grad(lambda x: density.log_density({"x": x})))(draws)
    error = scores.std(0) / math.sqrt(len(draws))
    assert (scores.mean(0).abs() < 4.5 * error).all()


def test_float32_goes_in_and_comes_out(density):
    x = torch.zeros(2, dtype=torch.float32)
    assert density.log_density({"x": x}).dtype == torch.float32
    assert density.start()["x"].shape == density.mean.shape


@pytest.mark.parametrize(
    "make",
    [
        lambda: correlated_gaussian(0),
        lambda: correlated_gaussian(correlation=1.0),
        lambda: funnel(1),
        lambda: banana(scale=0),
        lambda: bimodal(0),
        lambda: bimodal(distance=-1.0),
        lambda: bimodal(weight=1.0),
    ],
    ids=["no dimensions", "perfect correlation", "a funnel of one", "no scale", "no modes", "too near", "one mode"],
)
def test_densities_that_make_no_sense_are_refused(make):
    with pytest.raises(kn.InvalidArgument):
        make()


def test_two_modes_are_a_mixture_of_two_normals(generator):
    density = bimodal(2, distance=6.0, weight=0.3)
    left, right = (scipy.stats.multivariate_normal([place, 0.0]) for place in (-3.0, 3.0))
    for x in density.draw(5, generator):
        expected = np.log(0.3 * left.pdf(x.numpy()) + 0.7 * right.pdf(x.numpy()))
        assert density.log_density({"x": x}).item() == pytest.approx(expected, rel=1e-9)


def test_the_left_mode_has_its_share_of_the_draws(generator):
    # apart by 12 standard deviations no draw is on the wrong side: a binomial share
    draws = bimodal(1, distance=12.0, weight=0.3).draw(20_000, generator)
    assert (draws[:, 0] < 0).double().mean().item() == pytest.approx(0.3, abs=4.5 * math.sqrt(0.3 * 0.7 / 20_000))
