"""Fits that are wanted and the processes that do them.

A fit is known by what it fits: two tabs that ask for the same share it, and one that is asked for again is shown at
once. A fit that nobody waits for any more is stopped, and its process killed where it does not stop in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from knowable.errors import InvalidArgument
from knowable.interfaces.lab.fitting import Fit, Question, folder_of, work
from knowable.interfaces.lab.methods import offer_of
from knowable.interfaces.lab.picture import as_line

MOST_WORKERS, READY = 8, 5  # processes, and how many of them are there from the beginning
KEPT = 60  # fits that have ended and are remembered
MOST_WAITING = 60  # tasks
_PATIENCE = 2.0  # seconds in which a fit must stop


@dataclass(eq=False)
class Task:
    """Something for a worker, and what has come of it."""

    content: Fit | Question
    key: str = ""
    state: str = "waiting"  # "running", "done", "failed"
    line: bytes = b""  # the newest picture, or the answer
    version: int = 0
    watchers: set[asyncio.Event] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.state in ("done", "failed")

    def tell(self, state: str, line: bytes) -> None:
        """Something new, for all who watch."""
        self.state, self.line, self.version = state, line or self.line, self.version + 1
        for each in self.watchers:
            each.set()


def key_of(fit: Fit) -> str:
    """Names a fit by all that it depends on; settings of other methods do not count."""
    offer = offer_of(fit.method, fit.problem, judge=fit.judge)
    content = {**asdict(fit.problem), "method": fit.method, "judge": fit.judge}
    for name in {"beta", "rate"} - set(offer.uses):
        del content[name]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Pool:
    """Tasks and workers. Everything but the listening happens in the event loop."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="knowable-lab-"))
        self.workers: list[Worker] = []
        self.waiting: list[Task] = []
        self.fits: OrderedDict[str, Task] = OrderedDict()
        self.closed = False
        self._starting: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin with some workers; the first takes the seconds in which the library loads."""
        self.loop = asyncio.get_running_loop()
        for _ in range(READY):
            self._add()

    def close(self) -> None:
        """End everything."""
        self.closed = True
        for worker in self.workers:
            worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- what the page asks for --------------------------------------------------------------------------------------

    def fit(self, fit: Fit) -> Task:
        """The task of a fit, new or known."""
        key = key_of(fit)
        task = self.fits.get(key)
        if task is not None and task.state != "failed":
            self.fits.move_to_end(key)
            return task
        task = Task(replace(fit, folder=folder_of(self.folder, key)), key)
        self._take(task)
        self.fits[key] = task
        self._forget()
        return task

    def ask(self, action: str, fit: Fit, given: dict[str, Any], judge: Fit | None = None) -> Task:
        """The task of a question about a fit that has ended."""
        known = self.fits.get(key_of(fit))
        reference = None if judge is None else self.fits.get(key_of(judge))
        if known is None or known.state != "done" or (judge is not None and (reference is None or not reference.ended)):
            raise InvalidArgument("This method is still being fitted. Ask again when it is done.")
        assert isinstance(known.content, Fit)
        folder = reference.content.folder if reference is not None and isinstance(reference.content, Fit) else ""
        task = Task(Question(action, known.content, given, folder))
        self._take(task)
        return task

    def watch(self, task: Task) -> asyncio.Event:
        """An event that is set when there is something new."""
        event = asyncio.Event()
        task.watchers.add(event)
        return event

    def leave(self, task: Task, event: asyncio.Event) -> None:
        """Watch no longer; what nobody watches is stopped."""
        task.watchers.discard(event)
        if task.watchers or task.ended:
            return
        if self.fits.get(task.key) is task:
            del self.fits[task.key]
        if task in self.waiting:
            self.waiting.remove(task)
        for worker in self.workers:
            if worker.task is task:
                worker.stop()

    def _forget(self) -> None:
        for key in [key for key, task in self.fits.items() if task.ended and not task.watchers][:-KEPT]:
            del self.fits[key]
            shutil.rmtree(folder_of(self.folder, key), ignore_errors=True)

    # --- workers -----------------------------------------------------------------------------------------------------

    def _take(self, task: Task) -> None:
        if len(self.waiting) >= MOST_WAITING:
            raise InvalidArgument("Too much is waiting to be computed. Close a tab, or try again in a moment.")
        self.waiting.append(task)
        self.go_on()

    def go_on(self) -> None:
        """Give what waits to workers that are free, and get more of them where there are too few."""
        for task in list(self.waiting):
            free = [each for each in self.workers if each.free]
            if free:
                self.waiting.remove(task)
                free[0].begin(task)
        coming = sum(each.coming for each in self.workers)
        for _ in range(min(len(self.waiting) - coming, MOST_WORKERS - len(self.workers))):
            self._add()

    def _add(self) -> None:
        worker = Worker(self)
        self.workers.append(worker)
        starting = asyncio.create_task(asyncio.to_thread(worker.start))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)

    def ended(self, worker: Worker) -> None:
        """A worker's process has ended."""
        if worker in self.workers:
            self.workers.remove(worker)
        if worker.task is not None and not worker.stopping:
            worker.task.tell("failed", as_line({"error": "The process that computed this ended. Try again."}))
        if not self.closed:
            self.go_on()


class Worker:
    """A process, and a thread that listens to it."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.task: Task | None = None
        self.coming, self.stopping, self.gone = True, False, False
        self._process: Any = None

    @property
    def free(self) -> bool:
        """Whether it may begin a task."""
        return not self.coming and self.task is None and not self.stopping and not self.gone

    def start(self) -> None:
        """Start the process; it is ready a little later."""
        context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
        if sys.platform != "win32":
            context.set_forkserver_preload(["knowable.interfaces.lab.fitting"])  # loads the library once for all
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,), name="knowable-lab", daemon=True)
        self._process.start()
        theirs.close()
        threading.Thread(target=self._listen, daemon=True).start()
        if self.pool.closed or self.gone:
            self.kill()

    def begin(self, task: Task) -> None:
        """Give it a task."""
        self.task = task
        try:
            self._connection.send(task.content)
        except OSError:
            return  # its end is on the way
        task.tell("running", b"")

    def stop(self) -> None:
        """Stop what it does, by force where it takes too long."""
        self.stopping = True
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self.pool.loop.call_later(_PATIENCE, self._force, self.task)

    def _force(self, task: Task | None) -> None:
        if self.stopping and self.task is task:
            self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self.gone = True
        if self in self.pool.workers:
            self.pool.workers.remove(self)
        if self._process is not None:
            self._process.kill()

    def _listen(self) -> None:
        try:
            while True:
                kind, line = self._connection.recv()
                self.pool.loop.call_soon_threadsafe(self._heard, kind, line)
        except (EOFError, OSError):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self.pool.loop.call_soon_threadsafe(self.pool.ended, self)
        self._process.join()

    def _heard(self, kind: str, line: bytes) -> None:
        if kind == "picture":
            if self.task is not None and not self.stopping:
                self.task.tell("running", line)
            return
        task, stopped = self.task, self.stopping
        self.coming, self.task, self.stopping = False, None, False
        if task is not None and not stopped:
            task.tell("done" if kind == "done" else "failed", line)
        self.pool.go_on()
