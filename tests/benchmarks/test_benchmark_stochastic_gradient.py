from __future__ import annotations

import pytest
from benchmarks.run import run_benchmark
from benchmarks.stochastic_gradient import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result():
    return run_benchmark("benchmarks.stochastic_gradient", quick=True)


def test_quick_mode_has_a_table_for_each_network_with_one_chain_and_with_several(result):
    names = [case["name"] for case in result["cases"]]
    assert names == ["mlp_1", "mlp_4", "small_mlp_1", "small_mlp_4", "lenet_1", "lenet_4"]
    assert set(CASES) == {"mlp", "small_mlp", "lenet"}


@pytest.mark.parametrize("number", range(6))
def test_plain_network_and_our_samplers_run(result, number):
    contenders = result["cases"][number]["contenders"]
    names = [name for name in contenders if not name.startswith("posteriors")]
    assert len(names) == 7
    assert {name: contenders[name]["error"] for name in names} == dict.fromkeys(names)


def test_peers_are_in_the_table_whether_installed_or_not(result):
    for number in (0, 2, 4):
        contenders = result["cases"][number]["contenders"]
        peers = [contenders[name]["error"] for name in contenders if name.startswith("posteriors")]
        assert len(peers) == 2
        assert all(error is None or error.startswith("ModuleNotFoundError: No module named") for error in peers)
