"""Test that free memory goes back to the system."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from knowable.core.free_memory import give_back_free_memory


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
