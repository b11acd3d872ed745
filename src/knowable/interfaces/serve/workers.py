"""Worker processes that hold the model, watched by the service: one that dies is replaced, and its work done again.

Requests are accepted by one process and computed by others. What a worker had in hand when it died is still in hand
here, so that nothing that was accepted is lost with it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from knowable.errors import KnowableError
from knowable.interfaces.serve.rows import Ask, Description, Refused
from knowable.interfaces.serve.served import Served, Source

_LOG = logging.getLogger(__name__)


class WorkerDied(Exception):
    """A worker ended."""


class CannotLoad(Exception):
    """The model cannot be loaded; the message says why."""


class Worker:
    """One process with the model. Its methods block, and are called from threads, one at a time."""

    def __init__(self, source: Source, number: int):
        context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
        if sys.platform != "win32":
            context.set_forkserver_preload([__name__])  # which imports the library once, for all workers to come
        self.number = number
        self._ours, theirs = context.Pipe()
        self._process: Any = context.Process(
            target=_work, args=(theirs, source), name=f"knowable-{number}", daemon=True
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return int(self._process.pid)

    @property
    def sentinel(self) -> int:
        """What becomes ready when the process ends."""
        return self._process.sentinel

    def await_model(self) -> Description:
        """Wait until the model is loaded.

        Raises:
            CannotLoad: If it cannot be.
            WorkerDied: If the process ended.
        """
        found = self._answer()
        if isinstance(found, str):
            raise CannotLoad(found)
        return found

    def call(self, asks: Sequence[Ask]) -> list[dict[str, Any] | Refused]:
        """Answers to requests.

        Raises:
            WorkerDied: If the process ended.
        """
        try:
            self._ours.send(list(asks))
        except OSError:
            raise WorkerDied(f"worker {self.number} ended") from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._ours.recv()
        except (EOFError, OSError):
            raise WorkerDied(f"worker {self.number} ended") from None

    def kill(self) -> None:
        """End the process at once, at which a call that waits for it fails."""
        self._process.kill()

    def end(self, seconds: float = 5.0) -> None:
        """Let the process end, and kill it if it has not done so in time."""
        with contextlib.suppress(OSError):
            self._ours.close()  # at which it ends by itself when it has nothing in hand
        self._process.join(seconds)
        self.kill()
        self._process.join()


def _work(connection: Connection, source: Source) -> None:
    """A worker's life: load, then answer until nobody asks any more."""
    for each in (signal.SIGINT, signal.SIGTERM):  # which are for the service; it closes the connection
        signal.signal(each, signal.SIG_IGN)
    import torch

    torch.set_num_threads(source.threads)
    try:
        served = Served.load(source)
        served.warm()
    except (KnowableError, OSError, ValueError) as error:
        connection.send(str(error))
        return
    except Exception as error:
        _LOG.exception("the model cannot be loaded")
        connection.send(f"The model cannot be loaded: {type(error).__name__}: {error}")
        return
    connection.send(served.about)
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send(served.answer(connection.recv()))
