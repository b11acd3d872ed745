"""Free memory of the C library: kept for the next step, or returned to the operating system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

import torch

_LARGEST_LEARNED = 32 * 2**20  # bytes: what glibc learns from is no larger


@cache
def keep_free_memory() -> None:
    """Let the C library keep some tens of MB that it has free, for good; where it does not learn (glibc does): nothing.

    Training makes and frees the same tensors in every step. glibc gives free memory back above a threshold, and each
    page is fetched and zeroed again in the next step: for medium-sized networks a quarter of the time. The threshold
    follows the largest block that was freed so far, up to 32 MB; so one is freed here, which nobody has written to.
    """
    torch.empty(_LARGEST_LEARNED - 2**16, dtype=torch.uint8)  # freed at once


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
