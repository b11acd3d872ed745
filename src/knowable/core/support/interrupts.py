"""Ctrl-C that is also noted down, in case nobody hears it.

Python raises ``KeyboardInterrupt`` wherever the program happens to be. In a finaliser or a callback from compiled code
it is only printed and forgotten, and a fit would go on as if nobody had asked. So it is also noted down, and a loop
looks at the note each time round.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], None]]:
    """Within, call what this gives to raise ``KeyboardInterrupt`` if there was one that went nowhere.

    Other handlers than Python's own, and other threads than the main one, are left as they are.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.default_int_handler(number, frame)

    def look() -> None:
        if asked:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield look
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield look
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
