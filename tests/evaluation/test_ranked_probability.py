from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from knowable.evaluation import ranked_probability
from knowable.evaluation.ranked_probability import (
    TOLERANCE,
    continuous_crps,
    count_crps,
    normal_mixture_crps,
    sample_crps,
)

from .cases import DTYPE, log_weights

ERROR = 10 * TOLERANCE  # the error that crps states
NUMBERS = st.floats(-100, 100, allow_nan=False, width=32)


def _integral(cdf, y: float, *, reach: float) -> float:
    """∫ (F(x) - 1{x >= y})² dx over y ± reach, by scipy."""
    below, _ = integrate.quad(lambda x: cdf(x) ** 2, y - reach, y, epsabs=1e-11, epsrel=1e-11, limit=500)
    above, _ = integrate.quad(lambda x: (1 - cdf(x)) ** 2, y, y + reach, epsabs=1e-11, epsrel=1e-11, limit=500)
    return below + above


def _double_loop(samples: list[float], y: float) -> float:
    """E|X - y| - E|X - X'| / 2 over the empirical distribution, written out."""
    size = len(samples)
    spread = sum(abs(a - b) for a in samples for b in samples) / size**2
    return sum(abs(a - y) for a in samples) / size - spread / 2


@settings(deadline=None, max_examples=50)
@given(st.lists(NUMBERS, min_size=1, max_size=12), NUMBERS)
def test_sample_form_equals_the_double_loop(samples: list[float], y: float):
    score = sample_crps(torch.tensor(samples, dtype=DTYPE).unsqueeze(1), torch.tensor([y], dtype=DTYPE))
    assert score.item() == pytest.approx(_double_loop(samples, y), abs=1e-9)


def test_sample_form_converges_to_the_normal_closed_form(seed: int, generator: torch.Generator):
    # the empirical distribution adds E|X - X'| / (2K) on average; the rest is the error of a mean of |X - y|
    size, y = 200_000, torch.tensor([0.7], dtype=DTYPE)
    samples = torch.randn(size, 1, dtype=DTYPE, generator=generator)
    z, zero = torch.zeros(1, 1, dtype=DTYPE), torch.zeros(1, dtype=DTYPE)
    expected = normal_mixture_crps(z, z + 1, zero, y)
    assert abs(sample_crps(samples, y) - expected).item() < 5 * 1.0 / size**0.5


def test_normal_mixture_with_weights_matches_numerical_integration(seed: int, generator: torch.Generator):
    loc = torch.randn(5, 6, dtype=DTYPE, generator=generator)
    scale = 0.05 + torch.rand(5, 6, dtype=DTYPE, generator=generator)
    weights = log_weights(5, generator)
    y = 2 * torch.randn(6, dtype=DTYPE, generator=generator)
    score = normal_mixture_crps(loc, scale, weights, y)
    for row in range(6):
        parts = stats.norm(loc[:, row].numpy(), scale[:, row].numpy())
        expected = _integral(lambda x: weights.exp().numpy() @ parts.cdf(x), y[row].item(), reach=20.0)  # noqa: B023
        assert score[row].item() == pytest.approx(expected, abs=1e-8)


def test_one_normal_has_the_score_of_gneiting_and_raftery():
    # σ (z (2 Φ(z) - 1) + 2 φ(z) - 1/√π)
    z = np.linspace(-4, 4, 9)
    expected = 2.0 * (z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi))
    loc = torch.full((1, 9), 3.0, dtype=DTYPE)
    score = normal_mixture_crps(loc, torch.full_like(loc, 2.0), torch.zeros(1, dtype=DTYPE), torch.tensor(3 + 2 * z))
    np.testing.assert_allclose(score, expected, atol=1e-13)


def test_point_masses_are_scored_like_samples():
    points, y = torch.tensor([[0.0], [2.0], [2.0], [5.0]], dtype=DTYPE), torch.tensor([2.0], dtype=DTYPE)
    uniform = torch.full((4,), 0.25, dtype=DTYPE).log()
    score = normal_mixture_crps(points, torch.zeros_like(points), uniform, y)
    torch.testing.assert_close(score, sample_crps(points, y))


def test_splitting_a_component_in_two_changes_nothing():
    loc, scale = torch.tensor([[0.0], [1.0]], dtype=DTYPE), torch.tensor([[1.0], [0.5]], dtype=DTYPE)
    y = torch.tensor([0.3], dtype=DTYPE)
    once = normal_mixture_crps(loc, scale, torch.tensor([0.4, 0.6], dtype=DTYPE).log(), y)
    index = torch.tensor([0, 1, 1])
    split = normal_mixture_crps(loc[index], scale[index], torch.tensor([0.4, 0.25, 0.35], dtype=DTYPE).log(), y)
    torch.testing.assert_close(once, split)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_a_sum_gives_all_digits_of_the_pairs(spread: float, generator: torch.Generator):
    loc = spread * torch.randn(300, 6, dtype=DTYPE, generator=generator)
    scale = 0.5 + torch.rand(300, 6, dtype=DTYPE, generator=generator)
    weights = log_weights(300, generator).exp().unsqueeze(1)
    low, high = (loc - 8.5 * scale).amin(0), (loc + 8.5 * scale).amax(0)
    terms = math.ceil(((high - low) / (0.5 * scale.amin(0))).max().item())
    by_sum = ranked_probability._spread_by_sum(loc, scale, weights, low, high, terms)
    torch.testing.assert_close(by_sum, ranked_probability._spread_by_pairs(loc, scale, weights), rtol=1e-13, atol=0)


def test_many_components_and_many_copies_of_few_have_the_same_score(generator: torch.Generator):
    loc, y = torch.randn(4, 6, dtype=DTYPE, generator=generator), torch.randn(6, dtype=DTYPE, generator=generator)
    scale, weights = 0.001 + torch.rand(4, 6, dtype=DTYPE, generator=generator), log_weights(4, generator)
    scale[0, 0] = 0.0  # a point mass: only pairs can do it
    few = normal_mixture_crps(loc, scale, weights, y)  # by pairs
    copies = [each.repeat_interleave(500, 0) for each in (loc, scale, weights)]
    many = normal_mixture_crps(copies[0], copies[1], copies[2] - math.log(500), y)
    torch.testing.assert_close(many, few)
    torch.testing.assert_close(
        normal_mixture_crps(copies[0][:, 1:], copies[1][:, 1:], copies[2] - math.log(500), y[1:]), few[1:]
    )


def test_chunks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch):
    loc, y = torch.randn(7, 11, 2, dtype=DTYPE), torch.randn(11, 2, dtype=DTYPE)
    scale, weights = torch.rand(7, 11, 2, dtype=DTYPE), log_weights(7)
    whole = normal_mixture_crps(loc, scale, weights, y)
    monkeypatch.setattr(ranked_probability, "_CHUNK", 7 * 4)
    assert whole.shape == y.shape
    torch.testing.assert_close(normal_mixture_crps(loc, scale, weights, y), whole)


@pytest.mark.parametrize("narrowness", [1.0, 0.1, 0.03])
def test_integral_equals_the_closed_form_of_normals_within_its_stated_error(narrowness: float):
    loc, y = torch.randn(8, 50, dtype=DTYPE), 3 * torch.randn(50, dtype=DTYPE)
    scale, weights = narrowness * (0.5 + torch.rand(8, 50, dtype=DTYPE)), log_weights(8)

    def cdf(x: torch.Tensor) -> torch.Tensor:
        return (weights.exp().unsqueeze(1) * torch.special.ndtr((x - loc) / scale)).sum(0)

    length = (1 + y.square()).sqrt()
    error = (continuous_crps(cdf, y, length) - normal_mixture_crps(loc, scale, weights, y)).abs()
    assert (error / length).max() < ERROR


def test_integral_holds_the_tails_of_a_cauchy_distribution():
    # at the centre: 2 ∫_0^∞ (1/2 - arctan(x)/π)² dx, the integral by scipy on the half line
    half, _ = integrate.quad(lambda x: stats.cauchy.sf(x) ** 2, 0, np.inf, epsabs=1e-12)

    def cdf(x: torch.Tensor) -> torch.Tensor:
        return 0.5 + x.atan() / torch.pi

    score = continuous_crps(cdf, torch.zeros(1, dtype=DTYPE), torch.ones(1, dtype=DTYPE))
    assert score.item() == pytest.approx(2 * half, abs=TOLERANCE)


def _poisson_case(rates: list[list[float]], y: list[int]) -> tuple[torch.Tensor, np.ndarray]:
    """Our score of equal mixtures of Poissons, and the sum over counts written out."""
    rate, observed = torch.tensor(rates, dtype=DTYPE), torch.tensor(y, dtype=DTYPE)

    def cdf(k: torch.Tensor) -> torch.Tensor:
        return torch.special.gammaincc((k + 1).expand_as(rate), rate).mean(0)

    mean = rate.mean(0)
    std = (mean + rate.var(0, unbiased=False)).sqrt()
    score = count_crps(cdf, observed, mean, std, (std**2 + (mean - observed) ** 2).sqrt())
    k = np.arange(int(2 * rate.max() + 20 * rate.max() ** 0.5 + max(y) + 50))
    below = stats.poisson.cdf(k[:, None, None], rate.numpy()).mean(1)  # (counts, B)
    return score, ((below - (k[:, None] >= np.array(y))) ** 2).sum(0)


def test_counts_of_moderate_range_are_summed_exactly():
    score, expected = _poisson_case([[0.1, 2.0, 30.0, 4.0, 400.0], [0.3, 9.0, 50.0, 4.0, 410.0]], [0, 3, 20, 400, 2])
    np.testing.assert_allclose(score, expected, rtol=1e-6)


@pytest.mark.parametrize("narrow", [3.0, 60.0])
def test_counts_of_wide_range_are_integrated_to_the_stated_error(narrow: float):
    # one mixture is wide, one is half narrow, one is narrow and is summed beside them
    score, expected = _poisson_case([[900.0, narrow, 3.0], [1400.0, 4000.0, 2.0]], [1000, 5000, 1])
    scale = np.array([250.0, 2000.0])  # the standard deviations, roughly
    assert (np.abs(score.numpy() - expected)[:2] / scale).max() < ERROR
    assert score[2].item() == pytest.approx(expected[2], rel=1e-6)


@settings(deadline=None, max_examples=10)
@given(st.floats(2000, 10_000), st.floats(-10, 10))
def test_wide_poissons_equal_the_sum_wherever_the_outcome_lies(rate: float, z: float):
    y = round(rate + z * rate**0.5)
    score, expected = _poisson_case([[rate]], [y])
    assert abs(score.item() - expected[0]) < ERROR * (rate + (rate - y) ** 2) ** 0.5
