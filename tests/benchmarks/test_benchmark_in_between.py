from __future__ import annotations

import math

import pytest
from benchmarks.in_between import grid, run, summary, to_markdown
from benchmarks.study import Rows


def curve(value_of) -> list[float]:
    return [value_of(x) for x in grid().flatten().tolist()]


def test_summary_compares_with_the_reference_on_the_same_seed():
    flat = {"std": curve(lambda x: 1.0), "mean": curve(lambda x: 0.5), "seconds": 1.0}
    wide = {"std": curve(lambda x: 4.0 if abs(x) < 1 else 1.0), "mean": curve(lambda x: 0.0), "seconds": 3.0}
    found = summary({"0": flat, "1": {"error": "broken"}}, {"0": wide})
    assert found["ratio"] == pytest.approx(1.0)
    assert found["over_reference"] == pytest.approx(0.25)
    assert found["apart"] == pytest.approx(0.5)
    assert math.isnan(summary({"0": flat}, {})["over_reference"])


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_method_and_a_plot(tmp_path):
    found = run(quick=True, only="*", rows=Rows(tmp_path / "in_between.jsonl"))
    assert [fits["0"].get("error") for fits in found["methods"].values()] == [None] * len(found["methods"])
    text = to_markdown(found)
    assert all(f"| {title} |" in text for title in found["methods"])
    assert "R-hat of the function at most" in text
    assert (tmp_path / "in_between.png").stat().st_size > 10_000
