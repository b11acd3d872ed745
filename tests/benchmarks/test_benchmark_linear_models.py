from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.linear_models import cases, knowable_fit, numpy_fit
from benchmarks.run import run_benchmark


def test_quick_mode_runs_every_contender():
    (case,) = run_benchmark("benchmarks.linear_models", quick=True)["cases"]
    assert {name: each["error"] for name, each in case["contenders"].items()} == dict.fromkeys(
        cases(quick=True)[0].contenders
    )


@pytest.mark.parametrize("batched", [False, True], ids=["in memory", "in batches"])
def test_both_solve_the_same_equations(batched):
    mean = knowable_fit(25_000, batched=batched)().mean()
    found = torch.cat([mean["weight"].flatten(), mean["bias"]])
    np.testing.assert_allclose(found, numpy_fit(25_000, batched=batched)()[:, 0], rtol=0, atol=1e-12)
