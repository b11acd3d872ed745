"""The service without processes: a line whose workers live in threads, and an application to ask over ASGI."""

import os
import threading

from knowable.interfaces.serve.app import make_app
from knowable.interfaces.serve.batching import Line
from knowable.interfaces.serve.guard import Counters
from knowable.interfaces.serve.rows import Limits
from knowable.interfaces.serve.workers import WorkerDied


class LocalWorker:
    """A worker in this process. ``kill`` lets it die as a process does."""

    def __init__(self, served, number=0):
        self.served, self.number, self.pid = served, number, os.getpid()
        self.sentinel, self._end = os.pipe()
        self.dead = threading.Event()
        self.calls = []

    def await_model(self):
        return self.served.about

    def call(self, asks):
        if self.dead.is_set():
            raise WorkerDied("it was killed")
        self.calls.append(len(asks))
        return self.served.answer(asks)

    def kill(self):
        self.dead.set()
        os.write(self._end, b"x")

    def end(self, seconds=5.0):
        self.dead.set()


class Service:
    """A line and its application, open as long as the block lasts."""

    def __init__(self, served, *, limits=None, token=None, worker=LocalWorker, workers=1, **settings):
        self.limits, self.token, self.made = limits or Limits(), token, []

        def start(source, number):
            self.made.append(worker(served, number))
            return self.made[-1]

        self.events = []
        settings = {"rows": 2048, "waiting": self.limits.waiting, "seconds": self.limits.seconds, **settings}
        self.line = Line(
            served, workers=workers, start=start, said=lambda event, **facts: self.events.append(event), **settings
        )

    async def __aenter__(self):
        about = await self.line.open()
        self.counters = Counters()
        self.app = make_app(self.line, about, limits=self.limits, token=self.token, counters=self.counters)
        return self

    async def __aexit__(self, *error):
        await self.line.close()
