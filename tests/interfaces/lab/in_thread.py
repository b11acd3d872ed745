"""The lab on a port of this machine, in a thread of this process."""

import asyncio
import contextlib
import threading
import time

import uvicorn

from knowable.interfaces.lab.app import make_app
from knowable.interfaces.lab.pool import Pool


@contextlib.contextmanager
def at_a_port(port=0, pool=None):
    """The address of a lab that runs as long as the block."""
    found, stop = [], threading.Event()

    async def run():
        own = pool or Pool()
        config = uvicorn.Config(
            make_app(own), port=port, log_level="error", lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        server.install_signal_handlers = lambda: None
        own.open()
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        found.append(server.servers[0].sockets[0].getsockname()[1])
        while not stop.is_set():
            await asyncio.sleep(0.02)
        server.should_exit = server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        own.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    end = time.monotonic() + 60
    while not found:
        assert thread.is_alive() and time.monotonic() < end, "the lab does not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        stop.set()
        thread.join(60)
