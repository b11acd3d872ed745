from __future__ import annotations

import pytest
from benchmarks.run import run_benchmark
from benchmarks.step_time import ESTIMATORS


@pytest.fixture(scope="module")
def result():
    return run_benchmark("benchmarks.step_time", quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_plain_network_and_every_estimator_run(result, number):
    contenders = result["cases"][number]["contenders"]
    names = ["plain", *(f"knowable, {estimator}" for estimator in ESTIMATORS)]
    assert {name: contenders[name]["error"] for name in names} == dict.fromkeys(names)
