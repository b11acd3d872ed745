from __future__ import annotations

import subprocess
import sys

import pytest
from benchmarks.laplace_limits import LIMIT, contenders, run, to_markdown
from benchmarks.study import Rows, child_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")


@pytest.mark.slow
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
