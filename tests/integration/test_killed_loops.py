"""Loops that act on uncertainty, killed at random moments, end as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.integration.killed_loops import KILLS, LOOPS


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_killed_at_random_moments_gives_the_same_result(name, tmp_path, seed):
    command = [sys.executable, "-m", "tests.integration.killed_loops", name, str(tmp_path), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS
    assert found["ends"] == found["same"] > 0
