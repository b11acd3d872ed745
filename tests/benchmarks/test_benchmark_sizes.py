from __future__ import annotations

import sys

import pytest
import torch
from benchmarks.networks import PLAIN, ResNet18, ViTTiny
from benchmarks.sizes import Size, fit, growth, mlp_of, run, slope, steps, to_markdown
from benchmarks.study import Rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")
SMALL = Size(weights=5_000, rows=64, batch=16, draws=4)


@pytest.mark.parametrize("weights", [5_000, 100_000])
def test_network_has_about_as_many_weights_as_asked(weights):
    count = sum(value.numel() for value in mlp_of(weights, PLAIN).parameters())
    assert count == pytest.approx(weights, rel=0.05)


def test_resnet_18_has_its_eleven_million_weights():
    with torch.device("meta"):
        count = sum(value.numel() for value in ResNet18().parameters())
    assert count == pytest.approx(11.17e6, rel=0.01)


def test_vit_tiny_has_its_five_million_weights_and_a_row_of_logits_for_each_image():
    with torch.device("meta"):
        net = ViTTiny()
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sum(value.numel() for value in net.parameters()) == pytest.approx(5.36e6, rel=0.01)


def test_slope_is_the_power_of_the_largest_three():
    points = [(x, 3.0 * x**1.5) for x in (10.0, 100.0, 1000.0)]
    assert slope([(1.0, 1e9), *points]) == pytest.approx(1.5)


def test_growth_has_a_row_for_each_method_that_finished_twice():
    figures = {"predict": 1.0, "memory": 2.0, "predict_memory": 2.0}
    rows = [
        {"kind": "fit by rows", "size": {"method": "MAP", "rows": n}, "weights": 10, "seconds": 0.1 * n, **figures}
        for n in (10, 100)
    ]
    broken = {"kind": "fit by rows", "size": {"method": "SWAG", "rows": 10}, "error": "it failed"}
    found = growth([*rows, broken, broken])
    assert found == {"rows": {"MAP": {"seconds": pytest.approx(1.0), "memory": 0, "predict": 0, "predict_memory": 0}}}


@pytest.mark.slow
def test_steps_and_fits_of_a_small_network_are_measured():
    found = steps(SMALL, rounds=2)
    assert found["error"] is None
    assert all(found["contenders"][name]["ratio"] > 0 for name in ("MAP", "MeanFieldVI", "NaturalVI"))
    row = fit(SMALL, rounds=2)
    assert row["steps"] == 8 and row["seconds"] > 0 and row["own"] > 0


@pytest.mark.slow
def test_quick_study_writes_all_tables():
    found = run(quick=True, only="*", rows=Rows())
    assert all(row["error"] is None for row in found["rows"])
    text = to_markdown(found)
    assert "Growth with weights" in text and "over its own steps" in text
