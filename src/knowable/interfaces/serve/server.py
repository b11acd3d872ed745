"""Running the service: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from knowable.errors import InvalidArgument
from knowable.interfaces.serve.app import make_app
from knowable.interfaces.serve.batching import Line
from knowable.interfaces.serve.guard import Counters, Guard, log_as_json, said
from knowable.interfaces.serve.rows import Limits
from knowable.interfaces.serve.served import Source
from knowable.interfaces.serve.workers import CannotLoad

TOKEN = "KNOWABLE_TOKEN"
_PARTING = 0.5  # seconds in which clients hear that connections close, before the door does
_BATCH = 2048  # rows that are computed together
_SHORTEST = 16  # characters of a token
_HEAD, _HEAD_SECONDS = 32 * 1024, 30  # bytes of a request before its body, and seconds in which they come


def read_token(file: Path | None) -> str | None:
    """The token from a file, else from the environment; None where there is none.

    Raises:
        InvalidArgument: If it cannot be read, or is too short to be a secret.
    """
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"--token-file {file} cannot be read: {error}.") from None
        where = f"--token-file {file}"
    else:
        token, where = os.environ.get(TOKEN, "").strip(), TOKEN
        if not token:
            return None
    if len(token) < _SHORTEST or not token.isascii():
        raise InvalidArgument(
            f"{where} must hold a token of {_SHORTEST} or more plain characters. Make one with: openssl rand -hex 32"
        )
    return token


def run(
    source: Source, *, host: str, port: int, workers: int, token: str | None, limits: Limits, together: int = 1024
) -> None:
    """Serve until a signal says to stop.

    Args:
        source: What is served.
        host: Where to listen.
        port: And at which port; 0 takes a free one.
        workers: Processes that hold the model.
        token: What clients must know, or None.
        limits: How much they may ask.
        together: The most requests that are computed together.

    Raises:
        InvalidArgument: If the port cannot be had.
        CannotLoad: If the model cannot be loaded.
    """
    log_as_json()
    door = bound(host, port)
    with contextlib.closing(door), asyncio.Runner(loop_factory=uvicorn.Config("").get_loop_factory()) as runner:
        runner.run(_serve(source, door, workers=workers, token=token, limits=limits, together=together))


def bound(host: str, port: int) -> socket.socket:
    """The address, taken before the model is loaded; nobody is let in before that."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, kind)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
        return door
    except (OSError, OverflowError) as error:
        raise InvalidArgument(f"--host {host} --port {port} cannot be had: {error}.") from None


async def _serve(
    source: Source, door: socket.socket, *, workers: int, token: str | None, limits: Limits, together: int
) -> None:
    line = Line(
        source, workers=workers, rows=_BATCH, waiting=limits.waiting, seconds=limits.seconds, together=together,
        said=said,
    )  # fmt: skip
    about = await line.open()
    counters = Counters()
    guard = make_app(line, about, limits=limits, token=token, counters=counters)
    config = uvicorn.Config(
        guard, log_config=None, access_log=False, lifespan="off", server_header=False, http=_Connection,
        timeout_graceful_shutdown=int(limits.seconds) + 5, timeout_keep_alive=30, backlog=2048,
    )  # fmt: skip
    server = _Server(config, guard)
    host, port = door.getsockname()[:2]
    if token is None and host not in ("127.0.0.1", "::1"):
        said("warning", text=f"{host} can be reached from outside, and no token is asked for. Pass --token-file.")
    said("listening", host=host, port=port, pid=os.getpid(), workers=line.workers, model=about.name, task=about.task)
    watch = guard.app.state.watch
    watching = asyncio.create_task(watch.run()) if watch is not None else None
    try:
        await server.serve(sockets=[door])
    finally:
        if watching is not None:
            watching.cancel()
        await line.close()
        said("stopped")


class _Server(uvicorn.Server):
    """A server that tells its clients before it closes its door."""

    def __init__(self, config: uvicorn.Config, guard: Guard):
        super().__init__(config)
        self._guard = guard

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask clients to close their connections, a little later take no new ones; a second signal does not wait."""
        if self._guard.draining:
            self.should_exit = True
            self.force_exit = self.force_exit or sig == signal.SIGINT
            return
        self._guard.draining = True
        said("stopping", signal=signal.Signals(sig).name)
        loop: Any = self._loop
        loop.call_soon_threadsafe(loop.call_later, _PARTING, self._close_door)

    def _close_door(self) -> None:
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)


class _Connection(HttpToolsProtocol):
    """A connection on which what comes before a request's body may be neither endless nor slow."""

    _head = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Wait for a request, but not for ever."""
        super().connection_made(transport)
        self._wait()

    def on_message_begin(self) -> None:
        """A request begins."""
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its body has limits of its own."""
        self._stop_waiting()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Count what comes before the body."""
        super().data_received(data)
        if self._timer is not None:
            self._head += len(data)
            if self._head > _HEAD:
                self._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._head, self._timer = 0, self.loop.call_later(_HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._stop_waiting()
        self.transport.abort()


__all__ = ["CannotLoad", "bound", "read_token", "run"]
