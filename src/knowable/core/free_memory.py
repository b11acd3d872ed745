"""Memory that is free but still counts as ours, and how it goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back_free_memory() -> None:
    """Let the C library return what it holds free, where it can (glibc); otherwise nothing happens.

    Large tensors that come and go leave gaps that small ones move into, and the next large one finds no room: a long
    run can hold half as much again as it uses. The cost is that pages are fetched again when they are needed.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every C library
    if trim is not None:
        trim(0)
