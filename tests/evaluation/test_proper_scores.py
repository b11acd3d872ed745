from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import brier_score_loss

from knowable.errors import InvalidArgument, InvalidData
from knowable.evaluation.proper_scores import (
    brier_decomposition,
    energy_score,
    energy_score_rows,
    interval_score,
    interval_score_rows,
)
from knowable.evaluation.scores import brier, crps

from .cases import DTYPE, classes, counts, normals


def _slow_interval_score(low: float, high: float, y: float, alpha: float) -> float:
    score = high - low
    if y < low:
        score += 2 / alpha * (low - y)
    if y > high:
        score += 2 / alpha * (y - high)
    return score


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_interval_score_equals_the_loop(level: float):
    loc, scale, y = (
        torch.randn(1, 30, dtype=DTYPE),
        torch.rand(1, 30, dtype=DTYPE) + 0.1,
        2 * torch.randn(30, dtype=DTYPE),
    )
    low, high = stats.norm.interval(level, loc[0], scale[0])
    slow = [_slow_interval_score(*each, 1 - level) for each in zip(low, high, y.tolist(), strict=True)]
    torch.testing.assert_close(interval_score_rows((low, high), y, level=level), torch.tensor(slow, dtype=DTYPE))
    torch.testing.assert_close(
        interval_score_rows(normals(loc, scale), y, level=level), torch.tensor(slow, dtype=DTYPE), rtol=1e-6, atol=1e-6
    )


def test_interval_score_is_smallest_for_the_true_quantiles(generator):
    y = torch.randn(20_000, dtype=DTYPE, generator=generator)
    true = torch.full((20_000,), stats.norm.ppf(0.95), dtype=DTYPE)
    best = interval_score_rows((-true, true), y)
    for factor in (0.7, 1.4):
        other = interval_score_rows((-factor * true, factor * true), y) - best
        assert other.mean() > 4 * other.std() / math.sqrt(20_000)


def test_energy_score_equals_the_loop_over_pairs():
    samples, y = torch.randn(5, 7, 3, dtype=DTYPE), torch.randn(7, 3, dtype=DTYPE)
    samples[1] = samples[0]  # ties
    slow = []
    for row in range(7):
        near = sum((samples[k, row] - y[row]).norm().item() for k in range(5)) / 5
        pairs = [(samples[k, row] - samples[j, row]).norm().item() for k, j in itertools.permutations(range(5), 2)]
        slow.append(near - sum(pairs) / len(pairs) / 2)
    torch.testing.assert_close(energy_score_rows(samples, y), torch.tensor(slow, dtype=DTYPE), rtol=1e-10, atol=1e-12)


def test_energy_score_of_one_output_is_the_crps(generator):
    loc, scale = torch.randn(2, 400, dtype=DTYPE, generator=generator), torch.full((2, 400), 0.5, dtype=DTYPE)
    y = torch.randn(400, dtype=DTYPE, generator=generator)
    prediction = normals(loc, scale)
    found = torch.tensor([energy_score(prediction, y, draws=64, seed=seed) for seed in range(10)])
    assert abs(found.mean().item() - crps(prediction, y)) < 4 * found.std().item() / math.sqrt(10)


def test_energy_score_sees_correlations_that_the_crps_of_each_output_does_not(generator):
    root = torch.linalg.cholesky(torch.tensor([[1.0, 0.95], [0.95, 1.0]], dtype=DTYPE))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=DTYPE, generator=generator)

    y = draw(3000, 2) @ root.T
    right, wrong = draw(100, 3000, 2) @ root.T, draw(100, 3000, 2)
    gain = energy_score_rows(wrong, y) - energy_score_rows(right, y)
    assert gain.mean() > 4 * gain.std() / math.sqrt(3000)


def test_energy_score_needs_two_draws_and_whole_rows():
    with pytest.raises(InvalidData, match="two or more"):
        energy_score(torch.zeros(1, 3, 2), torch.zeros(3, 2))
    with pytest.raises(InvalidArgument, match="draws"):
        energy_score(counts(torch.ones(2, 3)), torch.ones(3), draws=1)


PROBS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.73, 1.0]), st.integers(0, 1)), min_size=1, max_size=40
)


@given(rows=PROBS, bins=st.integers(1, 12), binning=st.sampled_from(["width", "mass"]))
@settings(max_examples=60, deadline=None)
def test_brier_is_the_sum_of_its_parts(rows, bins: int, binning: str):
    p, y = (torch.tensor(each) for each in zip(*rows, strict=True))
    found = brier_decomposition(p.double(), y, bins=bins, binning=binning)
    assert found.score == pytest.approx(brier(p.double(), y), abs=1e-12)
    assert found.score == pytest.approx(2 * brier_score_loss(y, p.double(), labels=[0, 1], pos_label=1), abs=1e-12)
    assert found.reliability >= -1e-15 and found.resolution >= -1e-15 and 0 <= found.uncertainty <= 0.5
    assert found.resolution <= found.uncertainty + 1e-12


def test_parts_of_brier_by_a_loop_over_forecasts():
    """Murphy (1973): with a bin for every forecast nothing is left within bins."""
    p = torch.tensor([0.15, 0.15, 0.15, 0.65, 0.65, 0.95], dtype=DTYPE)
    y = torch.tensor([0, 1, 0, 1, 1, 1])
    found = brier_decomposition(p, y, bins=10)
    mean, reliability, resolution = 4 / 6, 0.0, 0.0
    for forecast in (0.15, 0.65, 0.95):
        own = y[p == forecast].double()
        reliability += len(own) / 6 * (forecast - own.mean().item()) ** 2
        resolution += len(own) / 6 * (own.mean().item() - mean) ** 2
    assert found.reliability == pytest.approx(2 * reliability)  # both classes
    assert found.resolution == pytest.approx(2 * resolution)
    assert found.uncertainty == pytest.approx(2 * mean * (1 - mean))
    assert found.within == pytest.approx(0.0, abs=1e-15)


def test_parts_of_brier_of_several_classes_and_one_row():
    probs, y = torch.rand(50, 4, dtype=DTYPE).log().softmax(1), torch.randint(4, (50,))
    assert brier_decomposition(probs, y).score == pytest.approx(brier(probs, y), abs=1e-12)
    assert brier_decomposition(classes(probs.unsqueeze(0)), y).score == pytest.approx(brier(probs, y), abs=1e-12)
    one = brier_decomposition(probs[:1], y[:1])
    assert one.resolution == one.uncertainty == 0.0
    assert one.score == pytest.approx(brier(probs[:1], y[:1]))


def test_interval_score_by_hand():
    assert interval_score(([0.0], [1.0]), [-0.1], level=0.8) == pytest.approx(1 + 10 * 0.1)
