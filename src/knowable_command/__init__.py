"""The command ``knowable``, outside the package: a Ctrl-C while that is imported, which takes seconds, ends quietly."""

from __future__ import annotations

import os
import signal
from types import FrameType

_INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it."""
    quietly = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quietly:
        signal.signal(signal.SIGINT, _end)
    from knowable.interfaces.cli import main

    if quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


def _end(number: int, frame: FrameType | None) -> None:
    """At once: compiled modules that are half imported may turn an exception into another, or swallow it."""
    os.write(2, b"knowable: stopped from the keyboard\n")
    os._exit(_INTERRUPTED)
