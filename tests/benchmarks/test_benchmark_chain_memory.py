from __future__ import annotations

import subprocess
import sys

import pytest
from benchmarks.chain_memory import (
    peak_memory,
    run,
    to_markdown,
)
from benchmarks.study import Rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")


@pytest.mark.slow
def test_peak_memory_sees_what_was_allocated():
    code = (
        "from benchmarks.chain_memory import peak_memory\nimport numpy as np\n"
        "before = peak_memory()\nx = np.ones(25_000_000)\ndel x\nprint(peak_memory() - before)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    assert int(said.stdout) == pytest.approx(200e6, rel=0.1)  # 25 million doubles, though gone by then
    assert peak_memory("no such process") == 0


@pytest.mark.slow
def test_quick_run_is_killed_and_resumed_to_the_same_draws():
    found = run(quick=True, only="*", rows=Rows())
    assert found["error"] is None and found["same_draws"] and found["within_limit"]
    assert found["runs"]["resumed"]["draws"] == found["size"]["draws"]
    assert "the resumed run ended with the same draws" in to_markdown(found)


def _environment() -> dict[str, str]:
    from benchmarks.study import child_environment

    return child_environment("")
