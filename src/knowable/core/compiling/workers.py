"""Independent pieces of work: one after the other in this process, or side by side on workers.

Members of an ensemble, groups of chains, methods on folds: each piece is a function of what all share and of a task of
its own, which says everything random in it. So where and in what order pieces are done does not change a bit of the
result. :func:`in_turn` does them here; :class:`Workers` says where else they may be done, and :func:`on_workers` keeps
those busy: it gathers results, warnings and progress, and starts what was lost with a worker again.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch

from knowable._version import __version__
from knowable.core.support.progress import Bar, ProgressSetting, Watcher, progress_bar, progress_sent, watched
from knowable.core.support.time_limit import share_of_time, time_left, time_limit
from knowable.errors import KnowableWarning, Unsupported, WorkerLost

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

ATTEMPTS = 3
"""How often a piece of work is begun, before the loss of its workers is an error."""

_POLL = 0.25  # seconds between two looks at the progress
_LEAST = 1e-3  # seconds that a piece of work gets where time is up


def in_turn(
    work: Callable[[S, Any], R], shared: S, tasks: deque[T], begin: Callable[[T], Any] | None
) -> Iterator[tuple[T, R]]:
    """Do the work here. See :meth:`~knowable.core.compiling.engine.Engine.run`."""
    while tasks:
        task = tasks.popleft()
        given = task if begin is None else begin(task)
        if given is None:
            continue
        with share_of_time(1 / (len(tasks) + 1)):
            result = work(shared, given)
        yield task, result


# --- workers, and a connection to them ------------------------------------------------------------------------------


@dataclass
class Counts:
    """How many pieces of work were started, how many were done, and how many were lost with their workers.

    Attributes:
        started: Begun on a worker, those included that were begun again.
        done: Ended with a result.
        lost: Lost with a worker.
    """

    started: int = 0
    done: int = 0
    lost: int = 0


class Workers(ABC):
    """Processes, on this machine or others, that do independent pieces of work.

    A concrete class is a frozen dataclass of settings: ``class Ray(Workers, name="ray")`` is also ``engine="ray"``.

    Attributes:
        num_workers: How many pieces are worked on at a time; None where that is found out later.
        counts: What was started, done and lost since they were made.
    """

    named: ClassVar[dict[str, type[Workers]]] = {}
    """The classes by the names under which ``engine=`` takes them."""
    num_workers: int | None
    counts: Counts

    def __init_subclass__(cls, *, name: str = "", **options: Any):
        super().__init_subclass__(**options)
        if name:
            Workers.named[name] = cls

    @abstractmethod
    def pool(self, work: Callable[[Any, Any], Any], shared: Any, *, told: bool) -> AbstractContextManager[Pool]:
        """A connection for pieces of this work, to which all they share is sent once."""


class Pool(ABC):
    """A connection to workers while they do one work."""

    at_once: int
    """How many pieces are done at a time."""

    @abstractmethod
    def start(self, task: Any, around: Surroundings) -> Any:
        """Begin a piece of work; returns what stands for its result, which can be the key of a dict."""

    @abstractmethod
    def wait(self, running: list[Any], seconds: float) -> list[Any]:
        """Those that have ended, or were lost, as soon as there are any; none after so many seconds."""

    @abstractmethod
    def result(self, ended: Any) -> Done:
        """The result of a piece that has ended, or the error in it; :class:`WorkerLost` where its worker is gone."""

    @abstractmethod
    def cancel(self, running: list[Any]) -> None:
        """Stop what is under way; its results are not wanted any more."""

    @abstractmethod
    def reports(self) -> list[Report]:
        """What workers have told of their progress since the last time."""


@dataclass
class _Piece:
    """A task under way or lost."""

    task: Any
    given: Any
    attempts: int = 0


def on_workers(
    workers: Workers,
    work: Callable[[S, Any], R],
    shared: S,
    tasks: deque[T],
    begin: Callable[[T], Any] | None,
    *,
    label: str,
    progress: ProgressSetting,
) -> Iterator[tuple[T, R]]:
    """Do the work on workers. See :meth:`~knowable.core.compiling.engine.Engine.run`."""
    counts, before = workers.counts, replace(workers.counts)
    running: dict[Any, _Piece] = {}
    lost: deque[_Piece] = deque()
    with _Gathered.shown(label, progress) as gathered, workers.pool(work, shared, told=gathered.wanted) as pool:
        try:
            while True:
                _fill(pool, running, lost, tasks, begin, counts, told=gathered.wanted)
                if not running:
                    break
                for ended in pool.wait(list(running), _POLL):
                    piece = running.pop(ended)
                    try:
                        done = pool.result(ended)
                    except WorkerLost as error:
                        counts.lost += 1
                        _check_attempts(piece, error)
                        lost.append(piece)
                        continue
                    counts.done += 1
                    for category, text in done.warned:
                        warnings.warn(text, category, stacklevel=3)
                    yield piece.task, done.result
                done_here = counts.done - before.done
                gathered.show(pool.reports(), done_here, done_here + len(running) + len(lost) + len(tasks))
        finally:
            pool.cancel(list(running))
    if counts.lost > before.lost:
        lost_here, started_here = counts.lost - before.lost, counts.started - before.started
        warnings.warn(
            f"{lost_here} of {started_here} pieces of work were lost with their workers and done again.",
            KnowableWarning, stacklevel=3,
        )  # fmt: skip


def _fill(
    pool: Pool, running: dict[Any, _Piece], lost: deque[_Piece], tasks: deque[Any],
    begin: Callable[[Any], Any] | None, counts: Counts, *, told: bool,
) -> None:  # fmt: skip
    """Start as many pieces as there are workers, first those that were lost."""
    while len(running) < pool.at_once and (lost or tasks):
        if lost:
            piece = lost.popleft()
        else:
            task = tasks.popleft()
            given = task if begin is None else begin(task)
            if given is None:
                continue
            piece = _Piece(task, given)
        waves = math.ceil((len(tasks) + len(lost) + 1) / pool.at_once)
        left = time_left()
        around = Surroundings.here(None if left is None else max(_LEAST, left / waves), told=told)
        running[pool.start(piece.given, around)] = piece
        piece.attempts += 1
        counts.started += 1


def _check_attempts(piece: _Piece, error: WorkerLost) -> None:
    if piece.attempts >= ATTEMPTS:
        raise WorkerLost(f"A piece of work was begun {ATTEMPTS} times, and each time its worker was lost. {error}")


# --- a worker's side -------------------------------------------------------------------------------------------------

_IN_WORKER = threading.local()


def in_worker() -> bool:
    """Whether this is a piece of work already, whose own parts are done in turn."""
    return getattr(_IN_WORKER, "now", False)


@dataclass(frozen=True)
class Surroundings:
    """What a piece of work depends on besides its arguments: the same on a worker as in the process that asked."""

    threads: int  # of an operation; sums are in another order with another number
    dtype: torch.dtype  # of new tensors
    versions: tuple[str, str]  # of knowable and torch
    seconds: float | None  # of its time limit
    told: bool  # whether anybody looks at the progress

    @classmethod
    def here(cls, seconds: float | None, *, told: bool) -> Surroundings:
        """Those of this process."""
        versions = (__version__, str(torch.__version__))
        return cls(torch.get_num_threads(), torch.get_default_dtype(), versions, seconds, told)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have them here for a while."""
        here = Surroundings.here(None, told=False)
        if here.versions != self.versions:
            theirs, ours = (f"knowable {v[0]} and torch {v[1]}" for v in (here.versions, self.versions))
            raise Unsupported(f"The worker has {theirs}, this process {ours}. Install the same versions on both.")
        _settle(self)
        try:
            with time_limit(self.seconds):
                yield
        finally:
            _settle(here)


def _settle(wanted: Surroundings) -> None:
    if torch.get_num_threads() != wanted.threads:
        torch.set_num_threads(wanted.threads)
    torch.set_default_dtype(wanted.dtype)


@dataclass(frozen=True)
class Report:
    """What a worker tells of its progress."""

    label: str  # of the bar
    done: float  # of this piece
    total: float
    text: str
    terms: Mapping[str, float]


@dataclass(frozen=True)
class Done:
    """The result of a piece of work, and the library's own warnings in it."""

    result: Any
    warned: list[tuple[type[Warning], str]]


def perform(
    work: Callable[[Any, Any], Any], shared: Any, task: Any, around: Surroundings, tell: Callable[[Report], None]
) -> Done:
    """Do a piece of work, on a worker."""
    before, _IN_WORKER.now = in_worker(), True
    try:
        with (
            around.restored(),
            warnings.catch_warnings(record=True) as said,
            progress_sent((lambda label: _Sent(label, tell)) if around.told else (lambda label: Bar())),
        ):
            warnings.simplefilter("always")
            result = work(shared, task)
    finally:
        _IN_WORKER.now = before
    own = [each for each in said if issubclass(each.category, KnowableWarning)]
    for each in said:
        if each not in own:  # of other libraries: for the worker's own log
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return Done(result, [(each.category, str(each.message)) for each in own])


class _Sent(Bar):
    """A bar on a worker: tells all figures, and now and then how far it is."""

    def __init__(self, label: str, tell: Callable[[Report], None]):
        self.label, self.tell, self._last = label, tell, -math.inf

    def update(self, done, total, text, terms=None, make=None):
        now = time.monotonic()
        if terms or now - self._last >= _POLL:
            self._last = now
            self.tell(Report(self.label, done, total, text, dict(terms or {})))


# --- progress, as it comes in ----------------------------------------------------------------------------------------


class _Gathered:
    """One bar for all pieces of work, and one for each of them that tells who looks on."""

    def __init__(self, bar: Bar, watcher: Watcher | None, open_bars: ExitStack):
        self.bar, self.watcher, self.open_bars = bar, watcher, open_bars
        self.wanted = watcher is not None or type(bar) is not Bar
        self.told: dict[str, Bar] = {}
        self.shares: dict[str, tuple[float, str]] = {}  # by label: how far it is, and what it says

    @classmethod
    @contextmanager
    def shown(cls, label: str, progress: ProgressSetting) -> Iterator[_Gathered]:
        """While the work goes on."""
        plain = progress is None or isinstance(progress, bool)
        with ExitStack() as stack:
            bar = stack.enter_context(progress_bar(label, progress if plain else None))
            yield cls(bar, None if plain else progress, stack)  # type: ignore[arg-type]

    def show(self, reports: list[Report], done: int, total: int) -> None:
        """Pass on what has come in."""
        for each in reports:
            if self.watcher is not None:
                if each.label not in self.told:
                    self.told[each.label] = self.open_bars.enter_context(watched(each.label, self.watcher))
                self.told[each.label].update(each.done, each.total, each.text, each.terms)
            self.shares[each.label] = each.done / max(each.total, 1e-9), each.text
        said = [f"{label} {100 * share:.0f}% {text}" for label, (share, text) in self.shares.items() if share < 1]
        self.bar.update(done, total, f"{done} of {total}{'; ' + said[-1] if said else ''}")
