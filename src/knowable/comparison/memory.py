"""Peak memory of a piece of work in this process."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from knowable.core.free_memory import give_back_free_memory

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """What was measured.

    Attributes:
        megabytes: The largest resident memory less what was held before, in units of 10^6 bytes; NaN where the system
            does not tell.
    """

    megabytes: float = math.nan


@contextmanager
def watched_memory() -> Iterator[Peak]:
    """Measure the block inside by the kernel's high-water mark, which is reset at its beginning (Linux).

    Free memory is given back first, so that it counts if it is used again; a few megabytes either way are noise.
    """
    peak = Peak()
    gc.collect()
    give_back_free_memory()
    before = _begin()
    try:
        yield peak
    finally:
        if before is not None:
            peak.megabytes = max(0.0, _status("VmHWM") - before)


def _begin() -> float | None:
    """Reset the mark; the memory held now, or None where that cannot be done."""
    try:
        _RESET.write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(key: str) -> float:
    """A field of the process's status, in MB."""
    found = re.search(rf"{key}:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError(f"the kernel does not report {key}")
    return int(found.group(1)) * 1024 / 1e6
