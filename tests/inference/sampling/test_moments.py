"""Tests of the yardstick: it passes exact draws and notices wrong ones."""

from __future__ import annotations

import math

import pytest
import torch

from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.posterior import Samples
from knowable.testing.densities import banana, bimodal, correlated_gaussian, funnel
from tests.inference.sampling.moments import expect_moments, limit, projections, z_scores

DENSITIES = [correlated_gaussian(10), banana(), funnel(3, scale=1.0), bimodal()]


def samples_of(draws: torch.Tensor) -> Samples:
    return Samples({"x": draws}, torch.zeros(draws.shape[:2]), ChainDiagnostics.of({"x": draws}))


def exact(density, generator, count: int = 500) -> torch.Tensor:
    return density.draw(4 * count, generator).unflatten(0, (4, count))


@pytest.mark.parametrize("density", DENSITIES, ids=lambda d: d.name)
def test_exact_draws_pass(density, generator):
    expect_moments(samples_of(exact(density, generator, 2000)), density)


def test_chains_that_forget_slowly_pass_for_their_error_is_larger(generator):
    # x' = 0.9 x + sqrt(0.19) z: 19 draws are worth one
    density = correlated_gaussian(2, correlation=0.0)
    x = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    draws = []
    for _ in range(3000):
        x = 0.9 * x + math.sqrt(0.19) * torch.randn(4, 2, generator=generator, dtype=torch.float64)
        draws.append(x)
    scale = density.covariance.diagonal().sqrt()
    expect_moments(samples_of(torch.stack(draws, 1) * scale), density)


@pytest.mark.slow
@pytest.mark.parametrize("density", DENSITIES[:2] + DENSITIES[3:], ids=lambda d: d.name)
@pytest.mark.parametrize(
    "wrong", [lambda x: 1.2 * x, lambda x: x + 0.3 * x.std((0, 1)), lambda x: x.clamp(-1.0, 1.0)],
    ids=["too wide", "off centre", "cut off"],
)  # fmt: skip
def test_wrong_draws_fail(density, wrong, generator):
    with pytest.raises(AssertionError, match=f"{density.name}: off by"):
        expect_moments(samples_of(wrong(exact(density, generator, 2000))), density)


def test_chains_in_one_mode_fail(generator):
    draws = exact(bimodal(distance=8.0), generator, 2000)
    draws[..., 0] = draws[..., 0].abs()
    with pytest.raises(AssertionError, match="mean"):
        expect_moments(samples_of(draws), bimodal(distance=8.0))


def test_scores_are_standard_normal_over_many_repeats(monkeypatch):
    monkeypatch.setattr("tests.inference.sampling.moments._EXACT", 100)  # these are for quantiles
    # 100 repeats of the score of a mean: variance 1 within 4.5 sqrt(2 / 100) and a little for estimated errors
    density = correlated_gaussian(1)
    scores = torch.cat(
        [z_scores(exact(density, torch.Generator().manual_seed(k), 100), density)["mean"] for k in range(100)]
    )
    assert abs(scores.mean()) < 4.5 / 10
    assert abs(scores.var() - 1) < 4.5 * math.sqrt(2 / 100) + 0.1


def test_the_limit_rises_with_the_number_of_figures():
    assert limit(1) == pytest.approx(4.0, abs=1e-6)
    assert 4.0 < limit(10) < limit(100) < 5.5


def test_directions_are_of_unit_length():
    for density in DENSITIES:
        torch.testing.assert_close(projections(density).norm(dim=1), torch.ones(len(projections(density))).double())
