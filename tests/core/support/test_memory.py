"""Test that free memory stays for the next step, and goes back to the system where that is asked for."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from knowable.core.support.tensors import give_back_free_memory

STEPS = """
import resource, torch
from knowable.core.support.tensors import keep_free_memory
{first}
def step():
    tensors = [torch.ones(2**20) for _ in range(8)]  # 4 MB each
def fetched():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
before = fetched()
for _ in range(20):
    step()
print(fetched() - before)
"""


def pages_fetched(first: str) -> int:
    """Pages that a new process fetches in twenty steps, after its first one."""
    done = subprocess.run([sys.executable, "-c", STEPS.format(first=first)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries do not learn")
def test_tensors_of_the_next_step_lie_where_those_of_the_last_did():
    assert pages_fetched("keep_free_memory()") < 20 * 8 * 100, "a tenth of the 1,024 pages of each tensor"


def resident() -> int:
    """Bytes of memory that count as this process's own."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such call")
def test_gaps_between_what_is_in_use_go_back_to_the_system():
    size, count = 64 * 1024, 2000  # small enough to be taken from the heap, large enough to hold whole pages
    pieces: list[bytearray | None] = [bytearray(b"x" * size) for _ in range(count)]
    pieces[::2] = [None] * (count // 2)
    before = resident()
    give_back_free_memory()
    assert before - resident() > 0.8 * size * count / 2
    assert all(piece == b"x" * size for piece in pieces[1::2])


def test_elsewhere_nothing_happens(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    give_back_free_memory()
