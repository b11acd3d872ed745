from __future__ import annotations

import importlib.util

import pytest
import torch
from benchmarks.gradients import NOISE, Network, knowable_target, rates, run, to_markdown
from benchmarks.harness import Outcome
from benchmarks.study import Rows

from benchmarks import gradients

TINY = {"regression": Network((3, 4, 2, 1), "tanh", 7), "classes": Network((3, 4, 3), "relu", 7, classes=True)}


@pytest.mark.parametrize("name", TINY)
def test_target_is_the_log_joint_written_out(name):
    network = TINY[name]
    positions = torch.from_numpy(network.positions(3)).double()
    target = knowable_target(network, "traced")
    values, gradients = target.value_and_grad(positions.float())
    expected = []
    for position in positions:
        flat = position.clone().requires_grad_()
        value = _log_joint(network, flat)
        value.backward()
        expected.append((value.detach(), flat.grad))
    # float32 against float64; the constants of prior and likelihood are the same for all chains
    torch.testing.assert_close(
        values.double() - values[0].double(), _column(expected, 0) - expected[0][0], rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(gradients.double(), _column(expected, 1), rtol=1e-4, atol=1e-4)


def _column(pairs, number):
    return torch.stack([pair[number] for pair in pairs])


def _log_joint(network: Network, flat: torch.Tensor) -> torch.Tensor:
    x, y = (torch.from_numpy(each) for each in network.data())
    hidden, first = x.double(), 0
    for number, (inputs, outputs) in enumerate(zip(network.widths[:-1], network.widths[1:], strict=True)):
        weight = flat[first : first + inputs * outputs].reshape(outputs, inputs)
        first += inputs * outputs
        hidden = hidden @ weight.T + flat[first : first + outputs]
        first += outputs
        if number < len(network.widths) - 2:
            hidden = hidden.tanh() if network.activation == "tanh" else hidden.relu()
    prior = -0.5 * flat.square().sum()
    if network.classes:
        return prior + hidden.log_softmax(1)[torch.arange(len(y)), y].sum()
    return prior - 0.5 * (hidden[:, 0] - y).square().sum() / NOISE**2


def test_rates_count_all_chains_and_compare_within_rounds():
    found = rates(Outcome([2.0, 4.0]), Outcome([4.0, 4.0]), chains=16)
    assert found["rate"]["best"] == 8000.0 and found["rate"]["median"] == 6000.0  # 16 in 2 ms, 16 in 4 ms
    assert found["times"]["median"] == 1.5


@pytest.mark.slow
def test_quick_run_makes_a_table_and_is_not_repeated(tmp_path, monkeypatch):
    step = gradients.knowable_step
    monkeypatch.setattr(gradients, "knowable_step", lambda network, chains, _: step(network, chains, "traced"))
    rows = Rows(tmp_path / "rows.jsonl")
    first = run(quick=True, only="tanh-*", rows=rows)
    (case,) = first["cases"]
    ours = case["contenders"]["knowable, traced"]
    assert ours["error"] is None and ours["rate"]["median"] > 0
    text = to_markdown(first)
    assert "| 3-4-1 tanh, N = 9 | 4 | knowable, traced |" in text
    if importlib.util.find_spec("jax") is None:
        assert "failed: ModuleNotFoundError: No module named 'jax'" in text
    assert run(quick=True, only="tanh-*", rows=Rows(tmp_path / "rows.jsonl"))["cases"] == first["cases"]
