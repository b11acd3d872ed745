"""Ctrl-C that cannot get lost.

Python raises ``KeyboardInterrupt`` wherever the program happens to be. In a finaliser, or in a callback from compiled
code, the exception is only printed and the program goes on. So it is also noted, and a loop raises it again each time
round.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises ``KeyboardInterrupt`` if there was a Ctrl-C which Python swallowed.

    Other handlers than Python's own, and other threads than the main one, are left as they are.
    """
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    def raise_if_interrupted() -> None:
        if interrupted:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield raise_if_interrupted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
