from __future__ import annotations

import pytest
from benchmarks.run import run_benchmark


@pytest.mark.slow
def test_quick_mode_predicts_with_every_contender():
    (case,) = run_benchmark("benchmarks.prediction", quick=True)["cases"]
    errors = {name: contender["error"] for name, contender in case["contenders"].items()}
    assert len(errors) == 6 and errors == dict.fromkeys(errors)
