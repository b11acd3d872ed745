"""Where chains begin on densities that are about normal around their modes, and on others."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

import knowable as kn
from knowable.core.chains.target import DensityTarget
from knowable.core.network.params import Layout
from knowable.inference.sampling.normal_start import near_modes, normal_around_mode
from knowable.testing.densities import correlated_gaussian, funnel

MEAN = torch.tensor([-60_000.0, 1250.0, 9.8], dtype=torch.float64)
COVARIANCE = torch.tensor(
    [[8.8e7, -1.325e6, 0.0], [-1.325e6, 2.0e4, 0.0], [0.0, 0.0, 4e-4]], dtype=torch.float64
)  # correlation -0.9987


def raw_scales() -> DensityTarget:
    """A normal as coefficients of raw predictors have it."""
    precision = torch.linalg.inv(COVARIANCE)

    def log_density(params):
        away = params["x"] - MEAN
        return -0.5 * away @ precision @ away

    return DensityTarget(log_density, Layout.of({"x": MEAN}))


def around_zero(chains: int, d: int, generator: torch.Generator) -> torch.Tensor:
    return 2 * torch.rand(chains, d, generator=generator, dtype=torch.float64) - 1


def test_a_normal_is_found_from_far_away_in_any_units(generator):
    normal = normal_around_mode(raw_scales(), around_zero(4, 3, generator), generator=generator)
    assert normal is not None
    torch.testing.assert_close(normal.factor @ normal.factor.T, COVARIANCE, rtol=1e-6, atol=0)
    away = torch.linalg.solve(torch.linalg.cholesky(COVARIANCE), normal.loc - MEAN)
    assert away.norm() < 1e-3


def test_chains_begin_as_draws_of_the_student_t_around_it(generator):
    found = near_modes(raw_scales(), around_zero(200, 3, generator), generator=generator)
    white = torch.linalg.solve(torch.linalg.cholesky(COVARIANCE), (found - MEAN).T)
    for coordinate in white:
        assert stats.kstest(coordinate.numpy(), stats.t(5).cdf).pvalue > 1e-5


def test_a_funnel_whose_mode_is_not_where_its_mass_is_is_left_alone(generator):
    density = funnel(10)
    target = DensityTarget(density.log_density, Layout.of(density.start()))
    position = around_zero(4, 10, generator)
    assert normal_around_mode(target, position, generator=generator) is None
    assert torch.equal(near_modes(target, position, generator=generator), position)


def test_every_chain_stays_with_its_own_mode(generator):
    def two(params):  # normals of width 0.1 at -3 and 3
        x = params["x"]
        return torch.logaddexp(-50 * (x - 3).square().sum(), -50 * (x + 3).square().sum())

    target = DensityTarget(two, Layout.of({"x": torch.zeros(2)}))
    sides = torch.tensor([-1.0, 1.0, 1.0, -1.0]).double().unsqueeze(1)
    position = 1.5 * sides.expand(4, 2) + 0.1 * around_zero(4, 2, generator)
    found = near_modes(target, position, generator=generator)
    assert torch.equal(found.mean(1).sign(), sides.squeeze(1))
    assert (found - 3 * sides).abs().max() < 3  # a Student t of scale 0.1 with 5 degrees of freedom


class OnceOnly(torch.autograd.Function):
    """-x²/2, whose gradient has no derivative of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return -0.5 * x.square().sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        return -slope * x


def test_densities_that_can_be_differentiated_once_only_are_taken(generator):
    target = DensityTarget(lambda params: OnceOnly.apply(params["x"]), Layout.of({"x": torch.zeros(2)}))
    normal = normal_around_mode(target, around_zero(2, 2, generator), generator=generator)
    assert normal is not None
    torch.testing.assert_close(normal.factor @ normal.factor.T, torch.eye(2, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_start_values_that_are_given_for_every_chain_are_kept(monkeypatch):
    def moved(*_):
        raise AssertionError

    monkeypatch.setattr(kn.HMC, "scattered", moved)
    density = correlated_gaussian(2)
    sampler = kn.HMC(chains=2, warmup=20, draws=5)
    sampler.sample(density.log_density, [density.start(), density.start()])
    with pytest.raises(AssertionError):
        sampler.sample(density.log_density, density.start())
