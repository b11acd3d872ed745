from __future__ import annotations

import pytest
from benchmarks.run import run_benchmark


@pytest.mark.slow
def test_quick_mode_runs_every_contender():
    cases = run_benchmark("benchmarks.frozen_backbone", quick=True)["cases"]
    errors = {
        (case["name"], name): contender["error"] for case in cases for name, contender in case["contenders"].items()
    }
    assert len(errors) == 15 and errors == dict.fromkeys(errors)
