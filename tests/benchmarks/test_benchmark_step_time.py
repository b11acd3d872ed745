from __future__ import annotations

import pytest
from benchmarks.run import run_benchmark
from benchmarks.step_time import ESTIMATORS


@pytest.fixture(scope="module")
def result():
    return run_benchmark("benchmarks.step_time", quick=True)


def test_quick_mode_has_a_table_for_each_network(result):
    assert [case["name"] for case in result["cases"]] == ["mlp", "lenet", "resnet"]


@pytest.mark.parametrize("number", range(3))
def test_plain_network_and_every_estimator_run(result, number):
    contenders = result["cases"][number]["contenders"]
    names = ["plain", *(f"knowable, {estimator}" for estimator in ESTIMATORS)]
    assert {name: contenders[name]["error"] for name in names} == dict.fromkeys(names)


@pytest.mark.parametrize("number", range(3))
def test_peers_are_in_the_table_whether_installed_or_not(result, number):
    contenders = result["cases"][number]["contenders"]
    peers = [name for name in contenders if name != "plain" and not name.startswith("knowable")]
    assert len(peers) == 7
    for name in peers:
        error = contenders[name]["error"]
        assert error is None or error.startswith("ModuleNotFoundError: No module named")
