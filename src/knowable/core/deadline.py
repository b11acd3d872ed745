"""A limit on the time that fits take, minded by the two loops.

``time_limit`` sets it for everything fitted inside. The training loop judges by the steps it has made how many more
there is time for, and lets its learning rate fall in time; the chain loop shortens its warm-up so that half of the time
is left for draws. A fit of several parts gives each a share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from knowable.core.checks import check_number

_END: ContextVar[float | None] = ContextVar("knowable_time_limit", default=None)  # on the monotonic clock
_LEAST = 1e-3  # seconds: what is left of a time that is up
_LOOK = 0.02  # of the time that is left, until the pace is judged anew


class TimeIsUp(Exception):
    """A block of transitions has come to the end of its time; the chain loop catches it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Let fits inside this take about so many seconds at the most, all of them together.

    A fit that settles, or chains that mix, before that end as they always do. One that does not is brought to a good
    end and says so in its diagnostics. How far it got depends on the machine, so that a fit which the limit has cut
    short is not the same to the bit when it is made again.

    Args:
        seconds: The limit. None: no limit but the one that may be around this one.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> with kn.time_limit(20):
        ...     posterior = kn.MAP(epochs=100).fit(model, (x, 2 * x))
    """
    if seconds is None:
        yield
        return
    end = time.monotonic() + check_number("seconds", seconds, above=0)
    around = _END.get()
    token = _END.set(end if around is None else min(around, end))
    try:
        yield
    finally:
        _END.reset(token)


@contextmanager
def share_of_time(share: float) -> Iterator[None]:
    """Give a part of a fit this share, in (0, 1], of the time that is left; without a limit nothing happens."""
    left = time_left()
    with time_limit(None if left is None else max(_LEAST, share * left)):
        yield


def time_left() -> float | None:
    """Seconds until the limit, 0 where it is past, None where there is none."""
    end = _END.get()
    return None if end is None else max(0.0, end - time.monotonic())


def check_time(end: float | None) -> None:
    """Raise TimeIsUp where the monotonic clock has come to ``end``."""
    if end is not None and time.monotonic() >= end:
        raise TimeIsUp


@dataclass
class Pace:
    """How many steps of a loop there is time for, judged by those made so far.

    The first step is left out of account: it may have had to prepare what the others use.

    Attributes:
        end: When time is up, on the monotonic clock.
        first: When the first step was done.
        number: Which one that was.
        look: When to judge anew.
    """

    end: float
    first: float | None = None
    number: int = 0
    look: float = 0.0

    @classmethod
    def within_limit(cls) -> Pace | None:
        """The pace to keep now; None where there is no limit."""
        end = _END.get()
        return None if end is None else cls(end)

    def possible(self, step: int) -> int | None:
        """How many steps there will be in all, once ``step`` are done; None where there is nothing new to say."""
        now = time.monotonic()
        if self.first is None:
            self.first, self.number = now, step
            self.look = now + _LOOK * (self.end - now)
            return step if now >= self.end else None
        if now < min(self.look, self.end):
            return None
        self.look = now + _LOOK * (self.end - now)
        each = (now - self.first) / max(1, step - self.number)
        return step + int(max(0.0, self.end - now) / max(each, 1e-9))


@dataclass(frozen=True)
class ChainTime:
    """The time that chains have, from their first transition on."""

    begun: float
    end: float

    @classmethod
    def within_limit(cls) -> ChainTime | None:
        """From now to the limit; None where there is none."""
        end = _END.get()
        return None if end is None else cls(time.monotonic(), end)

    @property
    def left(self) -> float:
        """Seconds until time is up."""
        return max(0.0, self.end - time.monotonic())

    def at(self, share: float) -> float:
        """When this share of the whole time will be used, on the monotonic clock."""
        return self.begun + share * (self.end - self.begun)

    def left_of(self, share: float) -> float:
        """Seconds until this share of the whole time is used."""
        return max(0.0, self.at(share) - time.monotonic())
