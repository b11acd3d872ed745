"""Requests wait in one line and are taken together: whatever came while the last call was computed is the next one.

There is no pause to collect requests, so that a single client waits for nothing. The line has an end: a request that
finds it full is told when to come again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from knowable.interfaces.serve.rows import Ask, Description, Refused
from knowable.interfaces.serve.served import Source
from knowable.interfaces.serve.workers import CannotLoad, Worker, WorkerDied

_LOG = logging.getLogger(__name__)
_TRIES = 3  # that a request gets when the worker dies with it
_START = 300.0  # seconds that loading may take


class Busy(Exception):
    """There is no room, or nobody to compute: come again after so many seconds."""

    def __init__(self, status: int, message: str, seconds: int):
        super().__init__(message)
        self.status, self.message, self.seconds = status, message, seconds


@dataclass(eq=False)
class _Waiting:
    """A request that was accepted and has no answer yet."""

    ask: Ask
    answer: asyncio.Future[dict[str, Any] | Refused]
    tries: int = 0
    since: float = field(default_factory=time.monotonic)


class Line:
    """The line of requests, and the workers that serve it.

    Args:
        source: What workers load.
        workers: How many.
        rows: The most rows that are computed together.
        waiting: The most rows that may wait.
        seconds: The most that a request may take, waiting included.
        together: The most requests that are computed together.
        said: Called with the name of what happened and its facts.
        start: Makes a worker of a source and a number.
    """

    def __init__(
        self, source: Source, *, workers: int, rows: int, waiting: int, seconds: float, together: int = 1024,
        said: Callable[..., None], start: Callable[[Source, int], Worker] = Worker,
    ):  # fmt: skip
        self._source, self.said, self._start = source, said, start
        self._number, self._rows, self._most, self._seconds = workers, rows, waiting, seconds
        self._together = together
        self._line: deque[_Waiting] = deque()
        self._something = asyncio.Event()
        self._threads = ThreadPoolExecutor(workers + 1, thread_name_prefix="worker")
        self._tasks: list[asyncio.Task[None]] = []
        self._alive: dict[int, Worker] = {}
        self._pace = 0.0  # rows a second
        self._closing = False
        self.waiting = 0
        self.restarts = 0
        self.calls = 0
        self.about: Description | None = None

    @property
    def ready(self) -> bool:
        """Whether all workers are there."""
        return len(self._alive) == self._number and not self._closing

    @property
    def workers(self) -> list[int]:
        """Numbers of the processes that are there."""
        return [worker.pid for worker in self._alive.values()]

    async def open(self) -> Description:
        """Start the workers; the first one's description of the model.

        Raises:
            CannotLoad: If the model cannot be loaded.
        """
        first = [asyncio.create_task(self._started(number)) for number in range(self._number)]
        workers = []
        try:
            for task in first:
                workers.append(await task)
        except (CannotLoad, WorkerDied) as error:
            for task in first:
                with contextlib.suppress(CannotLoad, WorkerDied):
                    (await task).end(0.0)
            raise CannotLoad(str(error)) from None
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in workers]
        assert self.about is not None
        return self.about

    async def close(self) -> None:
        """Finish what was accepted, then end the workers."""
        self._closing = True
        self._something.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)

    async def ask(self, ask: Ask) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            Busy: If the line is full, nobody serves it, or it took too long.
            Refused: If it cannot be answered.
        """
        if self._closing:
            raise Busy(503, "The service is shutting down.", 1)
        if self.waiting and (self.waiting + ask.count > self._most or self._expected > self._seconds):
            raise Busy(429, "Too many rows are waiting. Come again.", self.delay)
        one = _Waiting(ask, asyncio.get_running_loop().create_future())
        self._line.append(one)
        self.waiting += ask.count
        self._something.set()
        try:
            found = await asyncio.wait_for(one.answer, self._seconds)
        except TimeoutError:
            raise Busy(503, f"The answer took longer than {self._seconds:g} s.", self.delay) from None
        finally:
            if one in self._line:  # it gave up, or the client did
                self._line.remove(one)
            self.waiting -= ask.count
        if isinstance(found, Refused):
            raise found
        return found

    @property
    def _expected(self) -> float:
        """Seconds until what waits now will have been computed."""
        return self.waiting / self._pace if self._pace else 0.0

    @property
    def delay(self) -> int:
        """The same as whole seconds for Retry-After."""
        return max(1, min(60, math.ceil(self._expected)))

    # --- a worker's work ---------------------------------------------------------------------------------------------

    async def _started(self, number: int) -> Worker:
        loop = asyncio.get_running_loop()
        worker = await loop.run_in_executor(self._threads, self._start, self._source, number)
        try:
            with self._in_time(worker, _START):
                self.about = await loop.run_in_executor(self._threads, worker.await_model)
        except BaseException:
            worker.end(0.0)
            raise
        self._alive[number] = worker
        self.said("worker ready", worker=number, pid=worker.pid)
        return worker

    async def _serve(self, worker: Worker) -> None:
        """Serve the line with one worker after the other, until the service closes and nothing is left."""
        number, failures = worker.number, 0
        while True:
            try:
                await self._with(worker)
                self._alive.pop(number, None)
                await asyncio.to_thread(worker.end)
                return
            except WorkerDied as died:
                self._alive.pop(number, None)
                self.said("worker died", worker=number, pid=worker.pid, why=str(died))
                await asyncio.to_thread(worker.end, 0.0)
            while True:
                await asyncio.sleep(min(30.0, 0.1 * 2.0**failures) if failures else 0.0)
                try:
                    worker = await self._started(number)
                    self.restarts += 1
                    failures = 0
                    break
                except (CannotLoad, WorkerDied, OSError) as error:
                    failures += 1
                    self.said("worker cannot start", worker=number, why=str(error))
                    if self._closing and not self._line:
                        return

    async def _with(self, worker: Worker) -> None:
        """Serve the line until the worker dies or the service closes."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(worker.sentinel, ended.set)
        try:
            while True:
                batch = await self._next(ended)
                if batch is None:
                    return
                await self._compute(worker, batch)
        finally:
            loop.remove_reader(worker.sentinel)

    async def _next(self, ended: asyncio.Event) -> list[_Waiting] | None:
        """The requests to compute next; None when there will be no more."""
        while True:
            if ended.is_set():
                raise WorkerDied("it ended")
            batch, rows = [], 0
            while self._line and len(batch) < self._together:
                first = self._line[0]
                if batch and (rows + first.ask.count > self._rows or first.tries or batch[0].tries):
                    break  # one with which a worker has died goes alone
                batch.append(self._line.popleft())
                rows += first.ask.count
            if batch:
                return batch
            if self._closing:
                return None
            self._something.clear()
            either = [asyncio.ensure_future(each.wait()) for each in (self._something, ended)]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for each in either:
                each.cancel()

    async def _compute(self, worker: Worker, batch: list[_Waiting]) -> None:
        loop, started = asyncio.get_running_loop(), time.monotonic()
        try:
            with self._in_time(worker, self._seconds):
                answers = await loop.run_in_executor(self._threads, worker.call, [each.ask for each in batch])
        except WorkerDied:
            self._put_back(batch)
            raise
        self.calls += 1
        rows = sum(each.ask.count for each in batch)
        pace = rows / max(1e-6, time.monotonic() - started) * self._number
        self._pace = 0.8 * self._pace + 0.2 * pace if self._pace else pace
        for each, answer in zip(batch, answers, strict=True):
            if not each.answer.done():
                each.answer.set_result(answer)

    @contextlib.contextmanager
    def _in_time(self, worker: Worker, seconds: float) -> Iterator[None]:
        """Kill the worker if the block takes longer."""
        timer = asyncio.get_running_loop().call_later(seconds, self._too_slow, worker, seconds)
        try:
            yield
        finally:
            timer.cancel()

    def _too_slow(self, worker: Worker, seconds: float) -> None:
        self.said("worker too slow", worker=worker.number, pid=worker.pid, seconds=seconds)
        worker.kill()

    def _put_back(self, batch: list[_Waiting]) -> None:
        """Requests whose worker died go to the front again; one with which several have died gets an answer."""
        for each in reversed(batch):
            each.tries += 1
            if each.answer.done():
                continue
            if each.tries < _TRIES:
                self._line.appendleft(each)
            else:
                each.answer.set_result(Refused(503, "Workers ended while they computed this request."))
        self._something.set()
