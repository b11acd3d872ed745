"""Tests of accuracy and detection under attack."""

from __future__ import annotations

import pytest
import torch

import knowable as kn

from .cases import linear_regression, small_ensemble


def test_figures_are_those_of_predictions():
    posterior, x, y = small_ensemble()
    y = torch.where(torch.arange(40) < 4, (y + 1) % 3, y)  # 36 of 40 right
    moved = x + 1.0
    found = kn.attack.evaluate(posterior, x, moved, y, score="entropy", validation=2 * x)
    assert found.accuracy_clean == pytest.approx(0.9)
    assert found.accuracy == pytest.approx(kn.metrics.accuracy(posterior.predict(moved), y))
    expected = kn.detect(posterior.predict(x), posterior.predict(moved), score="entropy",
                         validation=posterior.predict(2 * x))  # fmt: skip
    assert found.detection.auroc == expected.auroc and found.detection.threshold == expected.threshold
    wrong = posterior.predict(moved).labels != y
    quiet = posterior.predict(moved).total <= expected.threshold
    assert found.undetected == pytest.approx((wrong & quiet).double().mean().item())
    assert found.standard_error == pytest.approx((found.accuracy * (1 - found.accuracy) / 40) ** 0.5)
    assert "40 rows: accuracy 90.0% clean" in repr(found)


def test_new_draws_judge_with_a_generator():
    posterior, x, y = small_ensemble()
    noisy = kn.DiagonalNormal(
        posterior.model, {name: value[0] for name, value in posterior.stack.items()},
        {name: torch.full_like(value[0], 0.3) for name, value in posterior.stack.items()},
    )  # fmt: skip
    old, new, again = (
        kn.attack.evaluate(noisy, x, x + 0.5, y, samples=4, generator=each).detection.outside
        for each in (None, torch.Generator().manual_seed(1), torch.Generator().manual_seed(1))
    )
    assert not torch.equal(old, new)
    assert torch.equal(new, again)


def test_wrong_calls_are_named():
    posterior, x, y = small_ensemble()
    with pytest.raises(kn.InvalidData, match="same number of rows"):
        kn.attack.evaluate(posterior, x, x[:5], y[:5])
    with pytest.raises(kn.InvalidData, match="same number of rows"):
        kn.attack.evaluate(posterior, x, x, y[:5])
    numbers = linear_regression(torch.ones(1, 4, dtype=torch.float64))
    with pytest.raises(kn.Unsupported, match="errors of classes"):
        kn.attack.evaluate(numbers, x, x, x[:, :1])
