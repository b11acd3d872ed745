"""Progress bars on long work, shown on a terminal and silent elsewhere; and Ctrl-C that cannot get lost."""

from __future__ import annotations

import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import FrameType

from knowable.errors import InvalidType


class Bar:
    """What a loop tells about its progress; this one shows nothing."""

    def update(self, done: float, total: float, text: str) -> None:
        """Say how far the work is, of how much, with a few words."""

    def record(self, step: int, figures: Mapping[str, float]) -> None:
        """Note the figures of a step: terms of the objective, diagnostics of the chains."""


class Tracker(ABC):
    """Where a fit sends its figures while it runs: ``fit(..., progress=tracker)``."""

    @abstractmethod
    def opened(self, label: str) -> AbstractContextManager[Bar]:
        """A bar that notes the figures of one piece of work, which is called ``label``."""


Progress = bool | Tracker | None
"""``progress=`` of a fit: True, False, None (only on a terminal), or a tracker (and a bar on a terminal)."""

_ELSEWHERE: ContextVar[Callable[[str], Bar] | None] = ContextVar("knowable_progress_elsewhere", default=None)


@contextmanager
def progress_sent(bar_for: Callable[[str], Bar] | None) -> Iterator[None]:
    """Give what is done inside other bars, made from their labels: those of a worker send to whoever waits for it."""
    token = _ELSEWHERE.set(bar_for)
    try:
        yield
    finally:
        _ELSEWHERE.reset(token)


@contextmanager
def progress_bar(label: str, show: Progress = None) -> Iterator[Bar]:
    """A bar on standard error.

    Args:
        label: What is being done.
        show: True, False, None to show it only on a terminal; or a tracker, which gets the figures.
    """
    if show is not None and not isinstance(show, bool | Tracker):
        raise InvalidType(
            f"progress must be True, False, None (only on a terminal) or a tracker such as kn.TensorBoard(folder), got "
            f"{show!r}."
        )
    elsewhere = _ELSEWHERE.get()
    if elsewhere is not None:
        yield elsewhere(label)
    elif isinstance(show, Tracker):
        with show.opened(label) as tracked, _drawn(label, None) as drawn:
            yield Bars([tracked, drawn])
    else:
        with _drawn(label, show) as bar:
            yield bar


class Bars(Bar):
    """Several bars as one."""

    def __init__(self, bars: Sequence[Bar]):
        self.bars = bars

    def update(self, done: float, total: float, text: str) -> None:
        for bar in self.bars:
            bar.update(done, total, text)

    def record(self, step: int, figures: Mapping[str, float]) -> None:
        for bar in self.bars:
            bar.record(step, figures)


@contextmanager
def _drawn(label: str, show: bool | None) -> Iterator[Bar]:
    """A bar that people see, or one that shows nothing."""
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
