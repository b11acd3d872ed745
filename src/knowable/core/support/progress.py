"""Progress bars on long work, shown on a terminal and silent elsewhere; and Ctrl-C that cannot get lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from knowable.errors import InvalidType


class Bar:
    """What a loop tells about its progress; this one shows nothing."""

    def update(self, done: float, total: float, text: str) -> None:
        """Say how far the work is, of how much, with a few words."""


@contextmanager
def progress_bar(label: str, show: bool | None = None) -> Iterator[Bar]:
    """A bar on standard error.

    Args:
        label: What is being done.
        show: True, False, or None to show it only on a terminal.
    """
    if show is not None and not isinstance(show, bool):
        raise InvalidType(f"progress must be True, False or None (only on a terminal), got {show!r}.")
    if show is False or (show is None and not sys.stderr.isatty()):
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False, refresh_per_second=5) as progress:
        task = progress.add_task(label, total=1.0, text="")

        class _Rich(Bar):
            def update(self, done: float, total: float, text: str) -> None:
                progress.update(task, completed=done, total=max(total, done), text=text)

        yield _Rich()


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises ``KeyboardInterrupt`` if there was a Ctrl-C which Python swallowed.

    In a finaliser, or in a callback from compiled code, the exception is only printed and the program goes on. Other
    handlers than Python's own, and other threads than the main one, are left as they are.
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
