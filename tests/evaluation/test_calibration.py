from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import InvalidArgument, InvalidData, InvalidType
from knowable.evaluation.calibration import (
    class_calibration,
    coverage,
    coverage_curve,
    coverage_rows,
    ece,
    interval_width,
    reliability_curve,
    rms_calibration_error,
)

from .cases import DTYPE, binary, classes, counts, normals, student


def _slow_ece(confidence: np.ndarray, right: np.ndarray, bins: int) -> float:
    """Guo et al. (2017), equation 3, one bin after the other."""
    total = 0.0
    for index in range(bins):
        chosen = (confidence > index / bins) & (confidence <= (index + 1) / bins)
        if chosen.any():
            total += chosen.mean() * abs(right[chosen].mean() - confidence[chosen].mean())
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_of_classes_equals_the_loop_over_bins(bins: int):
    probs, y = torch.randn(500, 4, dtype=DTYPE).mul(2).softmax(1), torch.randint(4, (500,))
    confidence, labels = probs.max(1)
    expected = _slow_ece(confidence.numpy(), (labels == y).numpy(), bins)
    assert ece(probs, y, bins=bins) == pytest.approx(expected, rel=1e-12)
    assert ece(classes(probs.unsqueeze(0)), y, bins=bins) == pytest.approx(expected, rel=1e-10)


def test_ece_by_hand():
    # bin (0.6, 0.8]: confidence 0.7, accuracy 1/2; bin (0.8, 1]: confidence 0.9, accuracy 1
    assert ece([0.7, 0.7, 0.9, 0.1], [1, 0, 1, 0], bins=5) == pytest.approx(0.5 * 0.2 + 0.5 * 0.1)


def test_ece_reads_both_encodings_and_pixels_alike():
    p, y = torch.rand(40, 2, 3, dtype=DTYPE), torch.randint(2, (40, 2, 3))
    flat = ece(p.flatten(), y.flatten())
    assert ece(torch.stack((1 - p, p), 1), y) == pytest.approx(flat, rel=1e-12)
    assert ece(binary(p.unsqueeze(0)), y) == pytest.approx(flat, rel=1e-10)


def test_ece_of_calibrated_classes_is_within_chance(seed: int, generator: torch.Generator):
    # each bin's gap is a mean of n_b errors of variance at most 1/4: E|gap| n_b / n <= sqrt(n_b) / (2 n), and
    # the sum over 15 bins is at most sqrt(15 / n) / 2 by Cauchy-Schwarz
    size = 100_000
    p = torch.rand(size, dtype=DTYPE, generator=generator)
    y = torch.bernoulli(p, generator=generator)
    assert ece(p, y) < 2 * math.sqrt(15 / size) / 2
    assert ece(p.clamp(0.3, 0.7), y) > 0.05  # and that of a timid forecast is not


def test_reliability_curve_holds_the_bins_and_their_borders():
    curve = reliability_curve([0.5, 0.75, 0.75, 0.76, 1.0], [0, 1, 0, 1, 1], 4)
    assert curve.edges.tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert curve.count.tolist() == [0, 1, 2, 2]  # a bin holds its upper border
    assert torch.isnan(curve.accuracy[0]) and torch.isnan(curve.confidence[0])
    np.testing.assert_allclose(curve.accuracy[1:], [1.0, 0.5, 1.0])
    np.testing.assert_allclose(curve.confidence[1:], [0.5, 0.75, 0.88])
    assert curve.error == pytest.approx((1 * 0.5 + 2 * 0.25 + 2 * 0.12) / 5)


def test_coverage_of_a_prediction_is_that_of_its_intervals():
    loc, y = torch.randn(4, 300, dtype=DTYPE), 2 * torch.randn(300, dtype=DTYPE)
    for prediction, observed in (
        (normals(loc, torch.rand(4, 300) + 0.1), y),
        (student(2.5, loc, 0.3), y),
        (counts(loc.exp()), torch.poisson(y.exp())),
    ):
        for level in (0.2, 0.9):
            low, high = prediction.interval(level)
            column = observed.view(low.shape)
            expected = ((column >= low) & (column <= high)).double().mean().item()
            assert coverage(prediction, observed, level=level) == coverage((low, high), observed)
            assert coverage((low, high), observed) == pytest.approx(expected, rel=1e-12)


def test_coverage_of_counts_at_the_very_borders_is_that_of_the_interval():
    prediction, y = counts(torch.full((1, 12), 3.0)), torch.arange(12)
    inside = [stats.poisson.ppf(0.05, 3.0) <= k <= stats.poisson.ppf(0.95, 3.0) for k in range(12)]
    assert coverage_rows(prediction, y, level=0.9).tolist() == [float(each) for each in inside]


class _Coin:
    """0 with probability 3/4, else 1: a distribution function that meets a level exactly."""

    discrete = True
    mean = torch.full((1, 2), 0.25, dtype=DTYPE)
    variance = torch.full((1, 2), 0.1875, dtype=DTYPE)

    def cdf(self, y: torch.Tensor) -> torch.Tensor:
        return (0.75 * (y >= 0) + 0.25 * (y >= 1)).to(DTYPE).unsqueeze(0)


def test_coverage_of_counts_is_that_of_the_interval_where_a_quantile_is_met_exactly():
    prediction = RegressionPrediction(_Coin(), torch.zeros(1, dtype=DTYPE))  # pyright: ignore
    low, high = prediction.interval(0.5)
    assert low.tolist() == high.tolist() == [0.0, 0.0]  # the 3/4-quantile is 0
    assert coverage_rows(prediction, [0, 1], level=0.5).tolist() == [1.0, 0.0]


def test_coverage_includes_the_borders_and_averages_outputs():
    low, high = torch.zeros(2, 2), torch.ones(2, 2)
    assert coverage_rows((low, high), [[0.0, 1.0], [0.5, 1.5]]).tolist() == [1.0, 0.5]
    assert coverage(([-math.inf], [0.0]), [-1e300]) == 1.0


def test_coverage_curve_of_a_normal_is_that_of_its_standard_scores():
    z = torch.tensor([-2.0, -0.7, 0.1, 1.0], dtype=DTYPE)
    levels = [0.1, 0.5, 0.7, 0.99]
    expected = [(np.abs(z.numpy()) <= stats.norm.ppf((1 + level) / 2)).mean() for level in levels]
    curve = coverage_curve(normals(torch.zeros(1, 4), torch.ones(1, 4)), z, levels)
    assert curve.levels.tolist() == levels
    np.testing.assert_allclose(curve.coverage, expected)
    assert ece(normals(torch.zeros(1, 4), torch.ones(1, 4)), z, bins=1) == 0.25  # one |z| of four is below 0.67


def test_ece_of_numbers_is_the_mean_gap_over_even_levels():
    prediction, y = normals(torch.zeros(1, 50), torch.ones(1, 50)), 3 * torch.randn(50, dtype=DTYPE)
    levels = (np.arange(10) + 0.5) / 10
    gaps = [abs(coverage(prediction, y, level=level) - level) for level in levels]
    assert ece(prediction, y, bins=10) == pytest.approx(np.mean(gaps), rel=1e-12)


def test_calibrated_counts_are_on_the_diagonal(seed: int, generator: torch.Generator):
    # a share in [0, 1] has a standard deviation of at most 1/2
    size = 20_000
    rate = 0.2 + 3 * torch.rand(1, size, dtype=DTYPE, generator=generator)
    curve = coverage_curve(counts(rate), torch.poisson(rate[0], generator=generator))
    assert len(curve.levels) == 19
    assert (curve.coverage - curve.levels).abs().max() < 4.5 * 0.5 / math.sqrt(size)


def test_calibrated_numbers_are_on_the_diagonal_and_timid_ones_are_not(seed: int, generator: torch.Generator):
    size = 20_000
    y = torch.randn(size, dtype=DTYPE, generator=generator)
    for scale, bounds in ((1.0, (0.0, 4.5 * 0.5 / math.sqrt(size))), (2.0, (0.15, 0.4))):
        error = coverage_curve(normals(torch.zeros(1, size), torch.full((1, size), scale)), y).error
        assert bounds[0] <= error < bounds[1]


def test_interval_width_of_a_normal_is_its_quantile_range():
    scale = torch.tensor([[0.5, 2.0]])
    expected = 2 * stats.norm.ppf(0.95) * 1.25
    assert interval_width(normals(torch.zeros(1, 2), scale)) == pytest.approx(expected, rel=1e-6)
    assert interval_width(normals(torch.zeros(1, 2), scale), 0.5) == pytest.approx(
        2 * stats.norm.ppf(0.75) * 1.25, rel=1e-6
    )
    assert interval_width((torch.zeros(3, 1), torch.tensor([1.0, 2.0, 6.0]))) == 3.0


def test_bad_arguments_are_named():
    prediction = normals(torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(InvalidArgument, match=r"level must be a finite number > 0 and < 1, got 90"):
        coverage(prediction, [0.0, 0.0], level=90)
    with pytest.raises(InvalidArgument, match="bins"):
        ece(prediction, [0.0, 0.0], bins=0)
    with pytest.raises(InvalidArgument, match="levels"):
        coverage_curve(prediction, [0.0, 0.0], [0.5, 1.0])
    with pytest.raises(InvalidData, match="levels is empty"):
        coverage_curve(prediction, [0.0, 0.0], [])
    with pytest.raises(InvalidType, match=r"pair \(low, high\)"):
        coverage(torch.zeros(2), [0.0, 0.0])
    with pytest.raises(InvalidData, match=r"low must be at most high.*row 1"):
        interval_width(([0.0, 2.0], [1.0, 1.0]))
    with pytest.raises(InvalidData, match=r"low must be at most high, and neither missing.*row 0"):
        interval_width(([math.nan], [1.0]))
    with pytest.raises(InvalidData, match="low has 2 rows but high has 3"):
        interval_width(([0.0, 2.0], [1.0, 1.0, 1.0]))
    with pytest.raises(InvalidType, match="Prediction over classes"):
        reliability_curve(prediction, [0, 1])
    with pytest.raises(InvalidType, match="over numbers for coverage_curve"):
        coverage_curve(classes(torch.full((1, 2, 2), 0.5)), [0, 1])
    with pytest.raises(InvalidData, match="y has missing"):
        coverage(([0.0], [1.0]), [math.nan])


# bins of equal mass, classes one by one, and without the bias of chance


@pytest.mark.parametrize("rows", [1, 3, 17, 400])
def test_bins_of_equal_mass_hold_the_same_number_where_there_are_no_ties(rows: int):
    p, y = torch.rand(rows, dtype=DTYPE) / 2 + 0.5, torch.randint(2, (rows,))
    curve = reliability_curve(p, y, 8, binning="mass")
    assert curve.count.sum() == rows
    assert curve.count[curve.count > 0].max() <= math.ceil(rows / 8) + 1
    order, total = p.sort().indices, 0.0
    first = 0
    for end in [round(rows * k / 8) for k in range(1, 9)]:
        own = order[first : max(end, 1)]
        if len(own):
            total += abs((y[own].double() - p[own]).sum().item()) / rows
        first = max(end, 1)
    assert ece(p, y, bins=8, binning="mass") == pytest.approx(total, abs=1e-12)


def test_equal_probabilities_share_a_bin_of_equal_mass():
    p, y = torch.tensor([0.6] * 50 + [0.8] * 50, dtype=DTYPE), torch.tensor([1, 0] * 25 + [1] * 50)
    assert ece(p, y, bins=15, binning="mass") == pytest.approx(0.5 * 0.1 + 0.5 * 0.2)
    assert ece([1.0, 1.0], [1, 1], binning="mass") == 0.0


def test_class_by_class_is_the_mean_over_one_against_the_others():
    probs, y = torch.rand(200, 3, dtype=DTYPE).mul(3).softmax(1), torch.randint(3, (200,))
    slow = [_slow_ece(probs[:, c].numpy(), (y == c).double().numpy(), 10) for c in range(3)]
    np.testing.assert_allclose(class_calibration(probs, y, bins=10), slow, rtol=1e-12)
    assert ece(probs, y, bins=10, classwise=True) == pytest.approx(np.mean(slow), rel=1e-12)


def test_rms_error_is_that_of_the_loop_and_debiased_it_is_near_zero_where_calibrated(generator: torch.Generator):
    p = torch.rand(300, dtype=DTYPE, generator=generator) / 2 + 0.5
    y = torch.bernoulli(p, generator=generator).long()
    for debiased in (False, True):
        total = 0.0
        for k in range(10):
            chosen = (p > k / 10) & (p <= (k + 1) / 10)
            if (count := int(chosen.sum())) > 1:
                share = y[chosen].double().mean().item()
                total += count / 300 * ((share - p[chosen].mean().item()) ** 2)
                total -= count / 300 * debiased * share * (1 - share) / (count - 1)
        found = rms_calibration_error(p, y, bins=10, binning="width", debiased=debiased)
        assert found == pytest.approx(math.sqrt(max(total, 0.0)), abs=1e-12)
    squares = []
    for _ in range(300):  # unbiased: the mean of the squares, below zero or not, is zero
        curve = reliability_curve(p, torch.bernoulli(p, generator=generator).long(), 10, binning="mass")
        chance = curve.accuracy * (1 - curve.accuracy) / (curve.count - 1)
        squares.append((((curve.accuracy - curve.confidence) ** 2 - chance) * curve.count).sum().item() / 300)
    assert abs(np.mean(squares)) < 4 * np.std(squares) / math.sqrt(300)
