from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from knowable.evaluation.pit import pit_histogram, pit_values, quantile_calibration_error, sharpness

from .cases import DTYPE, counts, normals

ROWS = 4000


def _calibrated(generator, factor=1.0):
    loc = torch.randn(1, ROWS, dtype=DTYPE, generator=generator)
    y = loc[0] + torch.randn(ROWS, dtype=DTYPE, generator=generator)
    return normals(loc, torch.full_like(loc, factor)), y


def test_values_are_those_of_the_mixture(generator):
    loc, scale = torch.randn(3, 40, dtype=DTYPE, generator=generator), torch.rand(3, 40, dtype=DTYPE) + 0.2
    y, weights = torch.randn(40, dtype=DTYPE, generator=generator), torch.tensor([0.2, 0.3, 0.5])
    slow = (weights.numpy()[:, None] * stats.norm.cdf(y, loc, scale)).sum(0)
    np.testing.assert_allclose(pit_values(normals(loc, scale, weights), y), slow, rtol=1e-7)  # weights are float32


def test_histogram_is_that_of_numpy(generator):
    prediction, y = _calibrated(generator, 0.7)
    found = pit_histogram(prediction, y, bins=7)
    slow, _ = np.histogram(pit_values(prediction, y), bins=7, range=(0, 1))
    np.testing.assert_allclose(found.share, slow / ROWS, atol=1e-12)
    assert found.share[0] > 1 / 7 + 4 * found.standard_error  # too sure


def test_calibrated_numbers_and_counts_are_flat(generator):
    prediction, y = _calibrated(generator)
    rate = 0.5 + 4 * torch.rand(1, ROWS, dtype=DTYPE, generator=generator)
    for each, seen in ((prediction, y), (counts(rate), torch.poisson(rate[0], generator=generator))):
        found = pit_histogram(each, seen, bins=10)
        assert found.share.sum() == pytest.approx(1.0)
        assert ((found.share - 0.1) / found.standard_error).abs().max() < 4.5
        assert stats.kstest(pit_values(each, seen), "uniform").pvalue > 1e-4
        assert quantile_calibration_error(each, seen) < 4 * 0.5 / math.sqrt(ROWS)


@given(y=st.lists(st.sampled_from([0.0, 1.0, 2.0, 9.0]), min_size=1, max_size=20), bins=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_histograms_of_counts_are_the_mean_of_random_ones(y, bins: int):
    prediction, seen = counts(torch.full((1, len(y)), 1.7)), torch.tensor(y)
    found = pit_histogram(prediction, seen, bins=bins)
    assert found.share.sum() == pytest.approx(1.0) and (found.share >= 0).all()
    slow = np.zeros(bins)
    for each in y:
        low, high = stats.poisson.cdf([each - 1, each], 1.7)
        for index in range(bins):
            inside = max(0.0, min(high, (index + 1) / bins) - max(low, index / bins))
            slow[index] += inside / (high - low) / len(y)
    np.testing.assert_allclose(found.share, slow, atol=1e-6)  # 1.7 in float32


def test_quantile_calibration_error_equals_the_loop(generator):
    prediction, y = _calibrated(generator, 0.6)
    values, total = pit_values(prediction, y), 0.0
    for level in range(1, 10):
        total += ((values <= level / 10).double().mean().item() - level / 10) ** 2 / 9
    assert quantile_calibration_error(prediction, y, levels=9) == pytest.approx(math.sqrt(total), rel=1e-10)


def test_quantile_calibration_error_sees_a_shift_at_the_median(generator):
    prediction, y = _calibrated(generator)
    assert quantile_calibration_error(prediction, y + 1.0) > 0.2


def test_sharpness_is_the_root_mean_variance():
    scale = torch.tensor([[1.0, 2.0, 2.0, 4.0]], dtype=DTYPE)
    assert sharpness(normals(torch.zeros_like(scale), scale)) == pytest.approx(math.sqrt(25 / 4))
