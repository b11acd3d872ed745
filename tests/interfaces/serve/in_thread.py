"""The service on a port of this machine, in a thread of this process."""

import asyncio
import contextlib
import threading
import time

import uvicorn

from tests.interfaces.serve.in_process import Service


@contextlib.contextmanager
def at_a_port(served, **settings):
    """The address of a service that runs as long as the block."""
    found, stop = [], threading.Event()

    async def run():
        async with Service(served, **settings) as service:
            config = uvicorn.Config(service.app, port=0, log_level="error", lifespan="off", ws="none")
            server = uvicorn.Server(config)
            server.install_signal_handlers = lambda: None
            serving = asyncio.create_task(server._serve())
            while not server.started:
                await asyncio.sleep(0.01)
            found.append(server.servers[0].sockets[0].getsockname()[1])
            while not stop.is_set():
                await asyncio.sleep(0.02)
            server.should_exit = True
            await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not found:
        assert thread.is_alive() and time.monotonic() < end, "the service does not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{found[0]}"
    finally:
        stop.set()
        thread.join(30)
