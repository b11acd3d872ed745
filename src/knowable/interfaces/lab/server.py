"""Running the lab on a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import webbrowser

import uvicorn

from knowable.interfaces.lab.app import make_app
from knowable.interfaces.lab.pool import Pool
from knowable.interfaces.serve.server import bound

_LEAVING = 1  # seconds that streams have to end


def run(*, host: str, port: int, token: str | None, browser: bool) -> None:
    """Serve the lab until a signal says to stop.

    Raises:
        InvalidArgument: If the port cannot be had.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that workers and files are cleared away
    door = bound(host, port)
    with contextlib.closing(door), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(door, token=token, browser=browser))


async def _serve(door: socket.socket, *, token: str | None, browser: bool) -> None:
    pool = Pool()
    config = uvicorn.Config(
        make_app(pool, token=token), log_config=None, access_log=False, lifespan="off", server_header=False, ws="none",
        timeout_graceful_shutdown=_LEAVING,
    )  # fmt: skip
    server = uvicorn.Server(config)
    host, port = door.getsockname()[:2]
    address = f"http://{'127.0.0.1' if host == '0.0.0.0' else f'[{host}]' if ':' in host else host}:{port}/"
    if token is None and host not in ("127.0.0.1", "::1"):
        print(f"warning: {host} can be reached from outside, and no token is asked for. Pass --token-file.",
              file=sys.stderr)  # fmt: skip
    try:
        pool.open()
        print(f"The lab is at {address}  (Ctrl-C ends it)", file=sys.stderr, flush=True)
        if browser and (sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY")):
            webbrowser.open(address)
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve(sockets=[door])
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        pool.close()
