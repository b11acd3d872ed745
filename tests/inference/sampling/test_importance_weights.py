"""Resampling, effective sample sizes, and Pareto smoothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from knowable.inference.sampling.importance_weights import (
    effective_sample_sizes,
    fit_generalised_pareto,
    largest_safe_k,
    pareto_quantile,
    smooth_weights,
    systematic_resample,
    tail_length,
)


def test_systematic_resampling_takes_each_as_often_as_its_weight_says(generator):
    log_weights = torch.tensor([0.5, 0.25, 0.0, 0.2, 0.05], dtype=torch.float64).log()
    counts = systematic_resample(log_weights, 20, generator).bincount(minlength=5)
    assert counts.tolist() == [10, 5, 0, 4, 1]
    odd = systematic_resample(torch.randn(50, generator=generator, dtype=torch.float64), 33, generator)
    assert (odd.diff() >= 0).all() and len(odd) == 33


def test_effective_sizes_predict_the_error_of_weighted_means(seed):
    # 400 runs of self-normalised importance sampling: N(0, 1) by N(0, 1.5²). The sd of the estimates of the mean
    # against sd / sqrt(ess): its own relative error is 1 / sqrt(800).
    generator = torch.Generator().manual_seed(seed)
    means, sizes = [], []
    for _ in range(400):
        x = 1.5 * torch.randn((500, 1), generator=generator, dtype=torch.float64)
        log_weights = (-0.5 * x.square() * (1 - 1 / 1.5**2)).squeeze(1)
        means.append((log_weights.softmax(0) @ x).item())
        sizes.append(effective_sample_sizes(x, log_weights).item())
    predicted = math.sqrt(sum(1 / size for size in sizes) / len(sizes))
    assert abs(torch.tensor(means).std().item() / predicted - 1) < 4 / math.sqrt(800)


# --- Pareto smoothing -------------------------------------------------------------------------------------------------


def heavy(count: int, k: float, seed: int) -> torch.Tensor:
    """Log weights with a Pareto tail of shape k: w = u^(-k)."""
    generator = torch.Generator().manual_seed(seed)
    return -k * torch.rand(count, generator=generator, dtype=torch.float64).log()


@pytest.mark.parametrize("count", [25, 100, 225, 226, 1000, 4000])
@pytest.mark.parametrize("k", [0.1, 0.5, 0.9, 2.0])
def test_smoothing_agrees_with_arviz(count, k):
    array_stats = pytest.importorskip("arviz_stats.base").array_stats
    log_weights = heavy(count, k, seed=count) + 300.0
    smoothed, found = smooth_weights(log_weights)
    theirs, their_k = array_stats.psislw(-log_weights.numpy())  # it takes the log of one over the weights
    assert found == pytest.approx(float(their_k), rel=1e-9)
    np.testing.assert_allclose(smoothed.log_softmax(0).numpy(), theirs, rtol=1e-9, atol=1e-9)


def test_smoothing_agrees_with_arviz_on_normal_weights(seed):
    array_stats = pytest.importorskip("arviz_stats.base").array_stats
    log_weights = 2 * torch.randn(500, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    theirs, their_k = array_stats.psislw(-log_weights.numpy())
    smoothed, found = smooth_weights(log_weights)
    assert found == pytest.approx(float(their_k), rel=1e-9)
    np.testing.assert_allclose(smoothed.log_softmax(0).numpy(), theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("k", [-0.3, 0.2, 0.7, 1.5])
def test_fit_finds_the_shape_and_scale_that_the_data_have(k, seed):
    # the standard error of k is (1 + k) / sqrt(n) (Smith, 1987); the weak prior moves it by 10 (1/2 - k) / n
    n = 20_000
    share = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    data = pareto_quantile(share, k, 2.0).sort().values
    found, scale = fit_generalised_pareto(data)
    assert abs(found - k) < 4 * (1 + k) / math.sqrt(n) + 10 * abs(0.5 - k) / n
    assert abs(scale / 2.0 - 1) < 4 * math.sqrt(2 * (1 + k) / n)


@pytest.mark.parametrize("k", [-0.4, 0.0, 1e-14, 0.3, 1.2])
def test_quantiles_are_those_of_scipy(k):
    share = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    expected = stats.genpareto.ppf(share.numpy(), k, scale=1.7)
    np.testing.assert_allclose(pareto_quantile(share, k, 1.7).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize(("k", "safe"), [(0.2, True), (1.3, False)])
def test_shape_tells_tails_that_can_be_trusted_from_those_that_cannot(k, safe, seed):
    _, found = smooth_weights(heavy(4000, k, seed))
    assert (found < largest_safe_k(4000)) is safe


def test_order_and_scale_are_kept_and_nothing_exceeds_the_largest(seed):
    log_weights = heavy(1000, 0.8, seed)
    smoothed, k = smooth_weights(log_weights)
    shifted, again = smooth_weights(log_weights - 1000.0)
    assert again == pytest.approx(k, rel=1e-6)
    assert torch.allclose(shifted + 1000.0, smoothed, atol=1e-6)
    assert (smoothed[log_weights.argsort()].diff() >= 0).all()
    assert smoothed.max() <= log_weights.max()
    body = log_weights.argsort()[: 1000 - tail_length(1000)]
    assert torch.equal(smoothed[body], log_weights[body])


def test_smoothing_lessens_the_error_of_an_estimate(seed):
    # the mean of w with k = 0.6: the raw variance is infinite; over 400 runs the smoothed one has the smaller error
    truth = 1 / (1 - 0.6)
    raw, smooth = [], []
    for run in range(400):
        log_weights = heavy(500, 0.6, seed=1000 * seed + run)
        raw.append((log_weights.exp().mean() - truth).item())
        smooth.append((smooth_weights(log_weights)[0].exp().mean() - truth).item())
    assert np.mean(np.square(smooth)) < np.mean(np.square(raw))


def test_too_few_or_equal_weights_are_left_alone():
    few = torch.arange(24.0, dtype=torch.float64)
    smoothed, k = smooth_weights(few)
    assert torch.equal(smoothed, few) and math.isnan(k)
    equal = torch.full((100,), -5.0, dtype=torch.float64)
    smoothed, k = smooth_weights(equal)
    assert torch.equal(smoothed, equal) and k == -math.inf
    none = torch.full((100,), -math.inf, dtype=torch.float64)
    assert math.isnan(smooth_weights(none)[1])


def test_weights_of_zero_stay_zero(seed):
    log_weights = heavy(1000, 0.3, seed)
    log_weights[:300] = -math.inf
    smoothed, k = smooth_weights(log_weights)
    assert (smoothed[:300] == -math.inf).all() and torch.isfinite(smoothed[300:]).all() and math.isfinite(k)


def test_one_weight_above_all_others_cannot_be_trusted():
    log_weights = torch.full((1000,), -math.inf, dtype=torch.float64)
    log_weights[5] = 0.0
    assert smooth_weights(log_weights)[1] > largest_safe_k(1000)
    log_weights = torch.linspace(-900, -600, 1000, dtype=torch.float64)
    log_weights[5] = 0.0
    smoothed, k = smooth_weights(log_weights)
    assert k > largest_safe_k(1000) and not smoothed.isnan().any()


def test_safe_k_grows_with_the_number_of_draws_up_to_its_limit():
    assert largest_safe_k(100) == pytest.approx(0.5)
    assert largest_safe_k(10**6) == 0.7
    assert largest_safe_k(4000) == 0.7
