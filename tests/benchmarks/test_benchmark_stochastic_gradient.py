from __future__ import annotations

import pytest
from benchmarks.run import run_benchmark

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result():
    return run_benchmark("benchmarks.stochastic_gradient", quick=True)


@pytest.mark.parametrize("number", range(6))
def test_plain_network_and_our_samplers_run(result, number):
    contenders = result["cases"][number]["contenders"]
    names = [name for name in contenders if not name.startswith("posteriors")]
    assert len(names) == 7
    assert {name: contenders[name]["error"] for name in names} == dict.fromkeys(names)
