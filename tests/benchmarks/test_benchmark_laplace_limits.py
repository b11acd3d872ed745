from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from benchmarks.laplace_limits import LIMIT, TASKS, contenders, measured, run, to_markdown
from benchmarks.study import Rows, child_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")


def test_tasks_have_the_outputs_promised():
    outputs = {name: task.network()(task.data(1)[0]).shape[1:] for name, task in TASKS.items()}
    assert outputs == {"classes": (1_000,), "segmentation": (8, 64, 64)}
    assert {name: task.data(2)[1].shape for name, task in TASKS.items()} == {
        "classes": (2,), "segmentation": (2, 64, 64),
    }  # fmt: skip


def test_what_a_function_takes_is_measured_and_its_error_is_kept():
    result, row = measured(lambda: torch.ones(25_000_000).numel())
    assert (
        result == 25_000_000 and row["peak"] == pytest.approx(100, rel=0.2) and row["seconds"] > 0
    )  # MB: 4 bytes each
    result, row = measured(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert result is None and row["error"].startswith("RuntimeError")


def test_limit_stops_what_is_too_large_and_nothing_else():
    code = (
        "import torch\nfrom benchmarks.laplace_limits import limit_memory, measured\nlimit_memory(200 * 2**20)\n"
        "print('error' in measured(lambda: torch.ones(10_000_000))[1])\n"
        "print('error' in measured(lambda: torch.ones(100_000_000))[1])"
    )
    environment = child_environment("")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert said.stdout.split() == ["False", "True"]


@pytest.mark.slow
def test_quick_run_has_a_row_for_every_contender():
    found = run(quick=True, only="*", rows=Rows())
    assert LIMIT == found["limit"] == 4 * 2**30
    for rows in found["tasks"].values():
        assert list(rows) == contenders(quick=True)
        for contender, row in rows.items():
            if contender.startswith("knowable"):
                assert row["fit"]["seconds"] > 0 and row["prediction"]["seconds"] > 0
    text = to_markdown(found)
    assert text.count("| knowable kron |") == 2 and "4 GiB" in text
