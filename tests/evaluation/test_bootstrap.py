from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.evaluation.bootstrap import bootstrap_error

from .cases import DTYPE, classes, normals


def test_error_of_a_mean_is_its_closed_form(generator):
    rows = torch.randn(500, 1, dtype=DTYPE, generator=generator)
    found = bootstrap_error(rows, lambda sums: sums[:, 0] / 500, resamples=2000)
    assert found == pytest.approx(rows.std().item() / math.sqrt(500), rel=4 / math.sqrt(2 * 2000) + 0.005)
    assert math.isnan(bootstrap_error(rows[:1], lambda sums: sums[:, 0]))


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_error_of_ece_is_its_spread_over_data_sets(kind: str, generator):
    found = []
    for _ in range(80):
        if kind == "classes":
            p = torch.rand(1, 400, dtype=DTYPE, generator=generator)
            y = torch.bernoulli((p[0] ** 1.7), generator=generator)
            scores = kn.evaluate(classes(torch.stack([1 - p, p], 2)), y)
        else:
            y = torch.randn(400, dtype=DTYPE, generator=generator)
            scores = kn.evaluate(normals(torch.zeros(1, 400), torch.full((1, 400), 1.6)), y)
        found.append((scores["ece"], scores.standard_errors["ece"]))
    values, errors = torch.tensor(found).T
    assert 0.65 < (errors.mean() / values.std()).item() < 1.6  # 80 repetitions know a standard deviation to 8%


def test_pixels_of_a_row_are_drawn_together(generator):
    p = torch.rand(1, 30, 1, 1, dtype=DTYPE, generator=generator)
    y = torch.bernoulli(p[0] ** 2, generator=generator)
    same_p, same_y = p.expand(1, 30, 5, 5), y.expand(30, 5, 5)
    pixels = kn.evaluate(classes(torch.stack([1 - same_p, same_p], 2)), same_y)
    single = kn.evaluate(classes(torch.stack([1 - p, p], 2)), y)
    assert pixels.standard_errors["ece"] == pytest.approx(single.standard_errors["ece"])
    assert pixels.standard_errors["accuracy"] == pytest.approx(single.standard_errors["accuracy"])
