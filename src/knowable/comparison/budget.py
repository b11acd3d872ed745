"""Seconds for a whole comparison, shared out between its fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_LEAST = 0.05  # seconds: less is no time for a fit
_OVERRUN = 1.2  # times its share: a method that takes longer ignores its time limit
_RESERVE = 0.5  # shares that are kept back until the last fit, for those that take longer than they should
_MARGIN = 0.1  # shares that the last one leaves, for the same reason


class Budget:
    """A clock that deals out what is left.

    Every fit gets an equal share of the time that is left, so that what a quick one leaves goes to those after it; the
    last also gets a reserve, so that another one's delay does not cost it its place. Of its share a fit may use what
    predicting and scoring do not take, as they have gone with this method so far, or with all where it is new.

    Args:
        seconds: For everything, or None for no limit.
        fits: How many fits are still to be made.
        spent: Seconds that earlier runs of the same comparison took.
        at_once: How many fits are made at a time.
        clock: Tells the time in seconds.
    """

    def __init__(
        self, seconds: float | None, fits: int, *, spent: float = 0.0, at_once: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._clock = clock
        self._end = math.inf if seconds is None else clock() + seconds - spent
        self._fits, self._at_once = fits, at_once
        self._besides: dict[str, list[float]] = {}  # seconds beside the fit, of every one so far
        self._needs: dict[str, float] = {}  # seconds of methods that exceed their share

    @property
    def left(self) -> float:
        """Seconds left, 0 where there are none; infinite without a limit."""
        return max(0.0, self._end - self._clock())

    def for_fit(self, method: str) -> float | None:
        """Seconds that the next fit may take, which is one of this method; None without a limit."""
        return None if math.isinf(self._end) else max(_LEAST, self._share - self._beside(method))

    def allows(self, method: str) -> bool:
        """Whether there is time to begin a fit of this method."""
        return self.left > max(self._beside(method), self._needs.get(method, 0.0))

    def count(self, method: str, *, began: float, fit: float) -> None:
        """A fit is done."""
        taken = began - self.left
        if math.isfinite(taken):
            self._besides.setdefault(method, []).append(max(0.0, taken - fit))
            if taken > _OVERRUN * began / max(1, self._turns):
                self._needs[method] = min(taken, self._needs.get(method, math.inf))
        self._fits -= 1

    def skip(self) -> None:
        """A fit will not be made: there is one less to share with."""
        self._fits -= 1

    @property
    def _share(self) -> float:
        return self.left / (self._turns + _RESERVE) if self._turns > 1 else self.left / (1.0 + _MARGIN)

    @property
    def _turns(self) -> int:
        """How many fits are still to be made one after the other."""
        return math.ceil(self._fits / self._at_once)

    def _beside(self, method: str) -> float:
        known = self._besides.get(method) or [each for taken in self._besides.values() for each in taken]
        return sum(known) / len(known) if known else 0.0
