"""A clock that goes when it is told to, so that limits of time can be tested without waiting."""

from __future__ import annotations

import pytest

from knowable.core.chains import run as chain_run
from knowable.core.support import time_limit as deadline


class Clock:
    """Stands in for the module ``time`` where loops look at it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of limits, and of the chain loop."""
    made = Clock()
    monkeypatch.setattr(deadline, "time", made)
    monkeypatch.setattr(chain_run, "time", made)
    return made
