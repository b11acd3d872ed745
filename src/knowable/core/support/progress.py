"""Progress of long work: a bar on a terminal, functions and trackers that look on; and Ctrl-C that cannot get lost."""

from __future__ import annotations

import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from knowable.core.support.randomness import own_randomness
from knowable.errors import InvalidType

_OFTEN = 0.1  # seconds after which a function wants to be told again, where the work can be divided


@dataclass(frozen=True)
class Progress:
    """How far a fit has come: what a function is told that is passed as ``fit(..., progress=function)``.

    The function is called after every record of the history (100 steps of training), and about ten times a second while
    chains run; a fit of several parts tells each. It may raise KeyboardInterrupt, at which the fit ends with what it
    has, as after Ctrl-C; any other exception ends the fit and reaches the caller. For a function chains are
    run in shorter blocks, and draws of samplers whose chains do not wait for each other (NUTS) are then others, from
    the same posterior.

    Attributes:
        label: What is being done, such as the method's name.
        done: Steps or transitions so far.
        total: How many there will be, as far as is known now.
        text: A few words.
        terms: Numbers of the last record: the loss and its terms.
        make: What :meth:`posterior` calls.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> seen = []
        >>> def look(progress):
        ...     seen.append((progress.done, progress.posterior().predict(x).mean.shape))
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(0.1))
        >>> posterior = kn.MeanFieldVI(epochs=200).fit(model, (x, x), progress=look)
        >>> seen
        [(100, torch.Size([20, 1])), (200, torch.Size([20, 1]))]
    """

    label: str
    done: float
    total: float
    text: str
    terms: Mapping[str, float] = field(default_factory=dict)
    make: Callable[[], Any] | None = field(default=None, repr=False)

    def posterior(self) -> Any:
        """The posterior as it is now, or None where the method has none before the end."""
        return None if self.make is None else self.make()


class Bar:
    """What a loop tells about its progress; this one shows nothing.

    Attributes:
        every: Seconds after which it wants to be told again, where it cannot wait.
    """

    every: float | None = None

    def update(
        self, done: float, total: float, text: str, terms: Mapping[str, float] | None = None,
        make: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        """Say how far the work is, of how much, with a few words, numbers, and a function that makes the posterior."""


class _Told(Bar):
    """Tells a function, which looks on without changing the random numbers of the fit."""

    every = _OFTEN

    def __init__(self, label: str, function: Callable[[Progress], Any]):
        self._label, self._function = label, function

    def update(self, done, total, text, terms=None, make=None):
        with own_randomness(0):
            self._function(Progress(self._label, done, max(total, done), text, dict(terms or {}), make))


class Tracker(ABC):
    """Where a fit sends its figures while it runs: ``fit(..., progress=tracker)``."""

    @abstractmethod
    def opened(self, label: str) -> AbstractContextManager[Bar]:
        """A bar that notes the figures of one piece of work, which is called ``label``."""


Watcher = Callable[[Progress], Any] | Tracker
"""Who looks on: a function or a tracker."""

ProgressSetting = bool | Watcher | None
"""``progress=`` of a fit: True, False, None (only on a terminal), or who looks on (beside a bar on a terminal)."""

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
def progress_bar(label: str, show: ProgressSetting = None) -> Iterator[Bar]:
    """A bar on standard error.

    Args:
        label: What is being done.
        show: True, False, None to show it only on a terminal; or a function of a :class:`Progress`, or a tracker.
    """
    if not (show is None or isinstance(show, bool | Tracker) or callable(show)):
        raise InvalidType(
            "progress must be True, False or None (only on a terminal), a function, or a tracker such as "
            f"kn.TensorBoard(folder), got {show!r}."
        )
    elsewhere = _ELSEWHERE.get()
    if elsewhere is not None:
        yield elsewhere(label)
    elif show is None or isinstance(show, bool):
        with _drawn(label, show) as bar:
            yield bar
    else:
        with watched(label, show) as told, _drawn(label, None) as drawn:
            yield Bars([told, drawn])


def watched(label: str, watcher: Watcher) -> AbstractContextManager[Bar]:
    """A bar that tells who looks on."""
    return watcher.opened(label) if isinstance(watcher, Tracker) else nullcontext(_Told(label, watcher))


class Bars(Bar):
    """Several bars as one."""

    def __init__(self, bars: Sequence[Bar]):
        self.bars = bars
        self.every = next((bar.every for bar in bars if bar.every is not None), None)

    def update(self, done, total, text, terms=None, make=None):
        for bar in self.bars:
            bar.update(done, total, text, terms, make)


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
            def update(self, done, total, text, terms=None, make=None):
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
