"""Watching the stream of rows: an alarm when they are no longer like the held-out ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from knowable.decisions.stream_alarm import StreamAlarm
from knowable.interfaces.serve.guard import Counters

MOST = 100_000
"""Rows after which the alarm begins anew, so that its memory has a bound."""
_KEPT, _AT_ONCE, _PAUSE = 4096, 64, 0.05  # rows that wait to be looked at, rows of one look, seconds between looks


class Watch:
    """The alarm of a certificate over the rows that clients send. Under load it looks at some of them.

    Args:
        reference: Scores of the held-out rows.
        delta: Probability of a false alarm in each ``MOST`` rows.
        counters: Where it is told.
        said: Called when the alarm is raised.
    """

    def __init__(self, reference: Sequence[float], delta: float, counters: Counters, said: Callable[..., None]):
        self._reference, self._delta, self._counters, self._said = list(reference), delta, counters, said
        self._alarm = StreamAlarm(self._reference, delta=delta)
        self._rows: deque[float] = deque(maxlen=_KEPT)
        self.alarmed = False

    def add(self, scores: Sequence[float]) -> None:
        """Scores of rows that were predicted."""
        self._rows.extend(scores)

    async def run(self) -> None:
        """Look at them, some at a time, so that nobody waits for it."""
        while True:
            await asyncio.sleep(_PAUSE)
            some = [self._rows.popleft() for _ in range(min(_AT_ONCE, len(self._rows)))]
            if some:
                self.look(some)

    def look(self, scores: Sequence[float]) -> None:
        """Take scores into account."""
        if self._alarm.seen + len(scores) > MOST:
            self._alarm = StreamAlarm(self._reference, delta=self._delta)
            self.alarmed = False
        if self._alarm.update(list(scores)) and not self.alarmed:
            self.alarmed = True
            self._said("stream alarm", rows=self._alarm.alarm_at, delta=self._delta)
        self._counters.alarm.set(self.alarmed)
        self._counters.wealth.set(self._alarm.log_wealth)

    def state(self) -> dict[str, Any]:
        """As ``/alarm`` tells it."""
        return {
            "alarm": self.alarmed,
            "rows": self._alarm.seen,
            "raised_after": self._alarm.alarm_at,
            "log_wealth": round(self._alarm.log_wealth, 6),
            "delta": self._delta,
        }
