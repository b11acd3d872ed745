from __future__ import annotations

import sys

import pytest
from benchmarks.memory import peak_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the Linux kernel's high-water mark")


@pytest.mark.slow
def test_memory_held_and_peak_are_those_of_the_tensors():
    # 60 MB held, 60 MB more within the step; pages and the allocator's rounding stay below 6 MB
    memory = peak_memory("tiny_benchmark", "tiny", "hungry")
    assert memory == {"built": pytest.approx(60.0, abs=6.0), "peak": pytest.approx(120.0, abs=6.0)}


def test_contender_that_fails_alone_reports_its_error():
    assert peak_memory("tiny_benchmark", "tiny", "broken") == {"error": "ValueError: a first | line"}
