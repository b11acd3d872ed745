"""A limit on the time that fits take, minded by the two loops.

``time_limit`` sets it for everything fitted inside. The training loop judges by the steps it has made how many more
there is time for, and lets its learning rate fall in time; the chain loop shortens its warm-up so that half of the time
is left for draws. A fit of several parts gives each a share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from knowable.core.support.checks import check_number

_END: ContextVar[float | None] = ContextVar("knowable_time_limit", default=None)  # on the monotonic clock
_LEAST = 1e-3  # seconds: what is left of a time that is up
_LOOK = 0.02  # of the time that is left, until the pace is judged anew


class TimeIsUp(Exception):
    """A transition has come to the end of its time; the chain loop catches it."""


@dataclass(frozen=True)
class BlockTime:
    """The time that a block of transitions has.

    Attributes:
        planned: When to begin no further transition, on the monotonic clock.
        end: When the one under way is given up.
    """

    planned: float
    end: float

    @property
    def enough(self) -> bool:
        """Whether no further transition should begin."""
        return time.monotonic() >= self.planned

    def check(self) -> None:
        """Raise TimeIsUp at the end."""
        if time.monotonic() >= self.end:
            raise TimeIsUp


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


@dataclass
class ChainTime:
    """The time that chains have, from their first transition on.

    Attributes:
        begun: When they began, on the monotonic clock.
        end: When time is up.
        first: When the first block was done, and its transitions: it may have had to prepare what the others use.
    """

    begun: float
    end: float
    first: tuple[float, int] | None = None

    @classmethod
    def within_limit(cls) -> ChainTime | None:
        """From now to the limit; None where there is none."""
        end = _END.get()
        return None if end is None else cls(time.monotonic(), end)

    @property
    def left(self) -> float:
        """Seconds until time is up."""
        return max(0.0, self.end - time.monotonic())

    def for_block(self, share: float, *, until: float) -> BlockTime:
        """This share of the time that is left, and never beyond the share ``until`` of all of it."""
        return BlockTime(time.monotonic() + share * self.left, self.at(until))

    def at(self, share: float) -> float:
        """When this share of the whole time will be used, on the monotonic clock."""
        return self.begun + share * (self.end - self.begun)

    def possible(self, done: int, share: float) -> int | None:
        """How many more transitions this share of the time holds, by the pace of those done; None: nobody knows yet."""
        now, left = time.monotonic(), self.left_of(share)
        if self.first is None:
            self.first = now, done
            return None if left else 0
        since, number = self.first
        return math.ceil(left * (done - number) / max(now - since, 1e-9))

    def left_of(self, share: float) -> float:
        """Seconds until this share of the whole time is used."""
        return max(0.0, self.at(share) - time.monotonic())
