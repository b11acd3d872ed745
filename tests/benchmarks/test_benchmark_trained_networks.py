from __future__ import annotations

import pytest
from benchmarks.environment import Environment
from benchmarks.study import Rows
from benchmarks.trained_networks import run, to_markdown


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_method_and_compares_with_the_network():
    found = run(quick=True, only="*", rows=Rows())
    methods = found["networks"]["digits"]
    assert [fits["0"].get("error") for fits in methods.values()] == [None] * len(methods)
    assert next(iter(methods)) == "the network" and len(methods) == 6
    text = to_markdown(found)
    assert all(f"| {title} |" in text for title in methods)


def test_differences_are_taken_seed_by_seed():
    row = {"accuracy": 0.5, "ece": 0.1, "seconds": 1.0}
    network = {"0": {**row, "nll": 1.0}, "1": {**row, "nll": 3.0}}
    ours = {"0": {**row, "nll": 1.5}, "1": {**row, "nll": 3.5}, "2": {"error": "broken"}}
    shown = {"quick": False, "benchmark": "b", "networks": {"digits": {"the network": network, "Laplace, kron": ours}}}
    text = to_markdown({**shown, "environment": Environment.now(()).to_dict()})
    assert "| Laplace, kron | 2.5000 ± 1.0000 | 0.5000 ± 0.0000 |" in text
