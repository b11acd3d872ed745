from __future__ import annotations

import math

import pytest
import torch
from benchmarks.infinite_width import distance, floor, inputs, model, run, slope, to_markdown
from benchmarks.study import Rows

import knowable as kn


def test_the_distance_is_that_of_two_normal_distributions(seed):
    """Of N(m, 1) to N(0, 1) it is m, and of N(0, s²) it is |s - 1| E|z|."""
    z = torch.randn(100_000, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    zero, one = torch.zeros(5), torch.ones(5)
    assert distance(z + 0.3, zero, one) == pytest.approx(0.3, abs=0.01)
    assert distance(1.5 * z, zero, one) == pytest.approx(0.5 * math.sqrt(2 / math.pi), abs=0.01)
    assert distance(3 * z + 2, 2 + zero, 3 * one) == pytest.approx(floor(100_000), rel=0.6)


def test_the_slope_of_a_power_is_its_exponent():
    found = {str(n): [{"distances": [0.3 * n**-1.2] * 2, "floor": 1e-4}] for n in (1, 2, 4, 8)}
    assert slope(found)[0] == pytest.approx(-1.2) and slope(found)[2] == 3
    assert math.isnan(slope({"2": found["2"]})[0])


def test_the_limit_is_the_same_at_every_width():
    for layers in (1, 2):
        kernels = [kn.infinite_width_kernel(model(width, layers), inputs()) for width in (2, 50)]
        torch.testing.assert_close(*kernels)


@pytest.mark.slow
def test_a_quick_run_has_every_part(tmp_path, monkeypatch):
    monkeypatch.delenv("KNOWABLE_DATA", raising=False)
    found = run(quick=True, only="*", rows=Rows(tmp_path / "infinite_width.jsonl"))
    assert not any("error" in row for each in found["distances"].values() for rows in each.values() for row in rows)
    assert "| slope |" in to_markdown(found) and found["mnist"] == {}
    assert (tmp_path / "infinite_width.png").stat().st_size > 10_000
