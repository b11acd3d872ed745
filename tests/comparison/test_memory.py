"""Peak memory sees what was allocated, though it is gone by the end."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from knowable.comparison import run as memory
from knowable.comparison.run import watched_memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")
def test_a_large_array_is_seen_though_it_is_gone_by_the_end():
    with watched_memory() as peak:
        values = np.ones(20_000_000)
        del values
    assert peak.megabytes == pytest.approx(160.0, abs=20.0)  # 20 million doubles, and a few MB of noise
    with watched_memory() as nothing:
        pass
    assert 0.0 <= nothing.megabytes < 20.0


def test_where_the_system_does_not_tell_the_figure_is_missing(monkeypatch):
    monkeypatch.setattr(memory, "_RESET", Path("/no/such/file"))
    with watched_memory() as peak:
        pass
    assert math.isnan(peak.megabytes)
