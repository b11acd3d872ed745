"""Tests of fits in several processes: the oracle is the same fit in one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import knowable as kn
from tests.engines import torchrun_tasks as tasks

SOURCE = str(Path(kn.__file__).parents[1])


def test_it_is_refused_outside_torchrun_and_known_by_its_name(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    model, rows = tasks.problem()
    with pytest.raises(kn.InvalidArgument, match="for a program that torchrun started, and RANK"):
        kn.MAP(epochs=1).fit(model, rows, engine="torch_distributed")
    with pytest.raises(kn.InvalidArgument, match=r"one of \['ray', 'torch_distributed'\], got 'torchrun'"):
        kn.MAP(epochs=1).fit(model, rows, engine="torchrun")
    with pytest.raises(kn.InvalidArgument, match="timeout must be"):
        kn.engines.TorchDistributed(timeout=0)


def test_the_gradient_at_one_draw_is_that_of_one_process_whatever_rows_each_has(tmp_path):
    """Equal to rounding in float64: the sums run in another order, and nothing else differs."""
    found = tasks.in_processes(tasks.gradient, tmp_path, False)
    assert not isinstance(found[0], str), found[0]
    _, rows = tasks.problem()
    for name in ("all", "batch"):
        parts = [each[name]["rows"] for each in found]
        expected = tasks.alone(tuple(torch.cat(each) for each in zip(*parts, strict=True)))
        for each in found:
            torch.testing.assert_close(each[name]["gradient"], expected["gradient"], rtol=1e-12, atol=1e-13)
            assert each[name]["loss"] == pytest.approx(expected["loss"], rel=1e-12)
            assert each[name]["kl"] == pytest.approx(expected["kl"], rel=1e-12)  # once, and not twice
    assert sum(len(each["all"]["rows"][0]) for each in found) == len(rows[0])
    assert found[0]["all"]["gradient"].equal(found[1]["all"]["gradient"])


@pytest.mark.slow
def test_unequal_shards_give_the_gradient_of_all_rows_and_batches_in_step(tmp_path):
    found = tasks.in_processes(tasks.gradient, tmp_path, True)
    assert not isinstance(found[0], str), found[0]
    assert [each["size"] for each in found] == [tasks.N, tasks.N]
    expected = tasks.alone(tasks.problem()[1])
    for each in found:
        torch.testing.assert_close(each["all"]["gradient"], expected["gradient"], rtol=1e-12, atol=1e-13)
        assert each["all"]["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    batches = [each["batches"] for each in found]  # an epoch has every row once, in as many batches in both
    assert [sum(each) for each in batches] == [tasks.CUT, tasks.N - tasks.CUT]
    assert len(batches[0]) == len(batches[1]) == -(-tasks.N // 64)
    parts = [each["batch"]["rows"] for each in found]
    expected = tasks.alone(tuple(torch.cat(each) for each in zip(*parts, strict=True)))
    torch.testing.assert_close(found[0]["batch"]["gradient"], expected["gradient"], rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # every gradient waits for the other process, which a busy machine lets run late
@pytest.mark.parametrize("shards", [False, True])
def test_samplers_on_divided_rows_give_the_draws_of_one_process(tmp_path, shards):
    """Draw for draw in float64, to the rounding that a trajectory carries on; also with a third of the rows in one.

    Mini-batches of rows that only one process has are other ones, so that SGLD is compared on shared rows alone.
    """
    names = [name for name in tasks.SAMPLERS if name != "SGLD" or not shards]
    found = tasks.in_processes(tasks.several_draws, tmp_path, names, shards, timeout=900.0)
    assert not isinstance(found[0], str), found[0]
    for name in names:
        expected = tasks.draws(None, name, False)
        assert found[0][name].equal(found[1][name])
        torch.testing.assert_close(found[0][name], expected, rtol=1e-7, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [False, True])
def test_variational_fits_agree_with_one_process_within_monte_carlo_error(tmp_path, shards):
    """Noise and batches differ, so that the means come to rest within a fraction of a scale of each other."""
    found = tasks.in_processes(tasks.vi_fit, tmp_path, shards)
    assert not isinstance(found[0], str), found[0]
    expected = tasks.vi_fit(None, False)
    for name, value in found[0]["mean"].items():
        assert value.equal(found[1]["mean"][name])
        scale = expected["std"][name]
        assert ((value - expected["mean"][name]).abs() < 0.5 * scale).all()
        assert ((found[0]["std"][name] / scale).log().abs() < 0.3).all()  # and not twice the KL, or half the rows
    error = (found[0]["elbo"][1] ** 2 + expected["elbo"][1] ** 2) ** 0.5
    assert abs(found[0]["elbo"][0] - expected["elbo"][0]) < 4 * error + 0.5  # nats
    assert found[0]["elbo"] == found[1]["elbo"]
    assert found[0]["history"] == expected["history"]


@pytest.mark.slow
def test_processes_that_were_given_different_things_are_refused(tmp_path):
    for said in tasks.in_processes(tasks.misuse, tmp_path):
        assert not isinstance(said, str), said
        assert "torch.manual_seed" in said["weights"]
        assert "shards=True" in said["rows"]
        assert "Settings differ" in said["seed"]


@pytest.mark.slow
def test_a_process_that_hangs_is_an_error_within_the_timeout(tmp_path):
    (said, seconds), _ = tasks.in_processes(tasks.hang, tmp_path, timeout=5.0)
    assert "did not answer in time" in said and "TorchDistributed(timeout=...)" in said
    assert 4.0 < seconds < 60.0  # of which a busy machine needs some to begin


@pytest.mark.slow
def test_weights_divided_among_processes_give_the_result_of_one(tmp_path):
    """SGD in float64: Adam would turn the rounding of gradients that are zero into steps."""
    found = tasks.in_processes(tasks.fully_sharded, tmp_path)
    assert not isinstance(found[0], str), found[0]
    expected, loss = tasks.fully_sharded(None)
    for each, last in found:
        assert last == pytest.approx(loss, rel=1e-9)
        for name, value in expected.items():
            torch.testing.assert_close(each[name], value, rtol=1e-8, atol=1e-9)
    for said in tasks.in_processes(tasks.refused, tmp_path):
        assert not isinstance(said, str), said
        wanted = ("MeanFieldVI needs all weights", "checkpoint=", "clip=", "parameters of its own", "torch.optim.SGD")
        assert all(part in text for part, text in zip(wanted, said, strict=True)), said


SCRIPT = """
    import os, signal, sys, torch
    import knowable as kn
    from knowable.core.training.loop import TrainingRun
    from tests.engines import torchrun_tasks as tasks

    mode, folder = sys.argv[1:]
    close = TrainingRun._close_window

    def close_or_die(self, *rest):
        if mode == "killed" and self.step == 300 and os.environ["RANK"] == "1":
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
        return close(self, *rest)

    TrainingRun._close_window = close_or_die
    model, rows = tasks.problem()
    posterior = kn.MeanFieldVI(epochs=100, batch_size=64).fit(
        model, rows, engine="torch_distributed", checkpoint=kn.Checkpoint(f"{folder}/{mode}", seconds=0)
    )
    torch.save(posterior.mean(), f"{folder}/{mode}-{os.environ['RANK']}.pt")
    if mode == "killed":
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
"""


@pytest.mark.slow
def test_a_process_that_is_killed_under_torchrun_ends_like_the_run_that_was_not(tmp_path):
    """Bit for bit: both processes start again from the checkpoint of the first."""
    script = tmp_path / "fit.py"
    script.write_text(textwrap.dedent(SCRIPT))
    for mode in ("whole", "killed"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["--max-restarts=2", str(script), mode, str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parents[2]}"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert run.returncode == 0, run.stderr[-3000:]
    whole, killed, other = (torch.load(tmp_path / f"{name}.pt") for name in ("whole-0", "killed-0", "killed-1"))
    for name, value in whole.items():
        assert value.equal(killed[name]) and value.equal(other[name])
