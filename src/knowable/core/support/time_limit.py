"""A limit on the time that fits take, which the training loop and the chain loop keep.

``time_limit`` sets it for everything fitted inside. Both loops ask a :class:`Deadline` how many more steps there is
time for: the training loop lets its learning rate fall in time, the chain loop shortens its warm-up so that half of the
time is left for draws. A fit of several parts gives each a share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from knowable.core.support.checks import check_number

_END: ContextVar[float | None] = ContextVar("knowable_time_limit", default=None)  # on the monotonic clock
_LEAST = 1e-3  # seconds: what is left of a time that is up
_ASK_AFTER = 0.02  # of the time that is left, until the number of steps is estimated again


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit the time of all fits inside, together, to about so many seconds.

    Training that converges, or chains that mix, before that end as usual. Otherwise the fit is brought to a good end
    and its diagnostics say so. How far it got depends on the machine: a fit that the limit has cut short is not
    reproducible to the bit.

    Args:
        seconds: The limit. None adds none to that of an enclosing ``time_limit``.

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


class TimeIsUp(Exception):
    """A transition has come to the end of its time; the chain loop catches it."""


@dataclass
class Deadline:
    """The time that a loop has, and how many steps fit into what is left, judged by the pace so far.

    The pace leaves out the first step, or the first block of them: it may have had to compile what the others use.
    """

    begun: float  # when the loop began, on the monotonic clock
    end: float  # when its time is up
    planned: float | None = None  # when to begin no further step; None is the end
    _first: tuple[float, int] | None = None  # when the first steps were done, and how many
    _ask_again: float = 0.0

    @classmethod
    def within_limit(cls) -> Deadline | None:
        """From now to the limit; None where there is none."""
        end = _END.get()
        return None if end is None else cls(time.monotonic(), end)

    @property
    def left(self) -> float:
        """Seconds until time is up."""
        return max(0.0, self.end - time.monotonic())

    @property
    def enough(self) -> bool:
        """Whether no further step should begin."""
        return time.monotonic() >= (self.end if self.planned is None else self.planned)

    def check(self) -> None:
        """Raise TimeIsUp at the end."""
        if time.monotonic() >= self.end:
            raise TimeIsUp

    def part(self, share: float, *, until: float = 1.0) -> Deadline:
        """The deadline of a block: this share of the time that is left, ending at the share ``until`` of all."""
        now = time.monotonic()
        return Deadline(now, self._at(until), planned=now + share * self.left)

    def steps_left(self, done: int, *, until: float = 1.0) -> int | None:
        """How many steps fit before the share ``until`` of all time is used, once ``done`` are; None: not known yet."""
        now = time.monotonic()
        left = max(0.0, self._at(until) - now)
        if self._first is None:
            self._first = now, done
            return None if left else 0
        since, number = self._first
        return int(left * max(1, done - number) / max(now - since, 1e-9))

    def total_steps(self, done: int) -> int | None:
        """How many steps there will be in all; None where it is too early to estimate that (again)."""
        now = time.monotonic()
        if now < min(self._ask_again, self.end):
            return None
        self._ask_again = now + _ASK_AFTER * (self.end - now)
        more = self.steps_left(done)
        return None if more is None else done + more

    def _at(self, share: float) -> float:
        return self.begun + share * (self.end - self.begun)
