"""Clients of a service, in a process of their own: ``python -m benchmarks.serving_load JSON`` prints what they saw.

Either ``clients`` of which each asks again as soon as it is answered, for ``seconds``; or, with ``rate``, requests that
are sent at that rate whatever becomes of them, as from very many clients.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any


class Client:
    """One connection that is kept open, and HTTP just enough to ask and read."""

    def __init__(self, port: int, path: str, bodies: list[bytes]):
        self.port, self.path, self.bodies = port, path, bodies
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, number: int) -> tuple[int, float, bool]:
        """Status (0: no answer), seconds, and whether the server closes the connection."""
        body = self.bodies[number % len(self.bodies)]
        head = f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        started = time.perf_counter()
        try:
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return -1, time.perf_counter() - started, True  # the door is closed: it was not accepted
        try:
            self.writer.write(head.encode() + b"\r\n\r\n" + body)
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
            await self.reader.readexactly(length)
            status, closing = int(lines[0].split()[1]), "connection: close" in lines
        except (OSError, asyncio.IncompleteReadError):
            status, closing = 0, True
        if closing:
            self.close()
        return status, time.perf_counter() - started, closing

    def close(self) -> None:
        """Hang up."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def closed_loop(plan: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    """Clients that ask again as soon as they are answered."""
    times: list[float] = []
    statuses: Counter[int] = Counter()
    end = time.perf_counter() + plan["seconds"]

    async def one(number: int) -> None:
        client, k = Client(plan["port"], plan["path"], bodies), number
        while time.perf_counter() < end:
            status, seconds, closing = await client.ask(k)
            statuses[status] += 1
            if status == 200:
                times.append(seconds)
            if closing and plan.get("leave"):
                break
            k += plan["clients"]
        client.close()

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(plan["clients"])))
    return found(times, statuses, time.perf_counter() - started)


async def open_loop(plan: dict[str, Any], bodies: list[bytes]) -> dict[str, Any]:
    """Requests at a rate, as independent clients send them."""
    times: list[float] = []
    statuses: Counter[int] = Counter()
    draw, idle, asking = random.Random(0), list[Client](), set[asyncio.Task[None]]()

    async def one(number: int) -> None:
        client = idle.pop() if idle else Client(plan["port"], plan["path"], bodies)
        status, seconds, _ = await client.ask(number)
        statuses[status] += 1
        if status == 200:
            times.append(seconds)
        idle.append(client)

    started = when = time.perf_counter()
    number = 0
    while when < started + plan["seconds"]:
        when += draw.expovariate(plan["rate"])
        await asyncio.sleep(max(0.0, when - time.perf_counter()))
        task = asyncio.create_task(one(number))
        asking.add(task)
        task.add_done_callback(asking.discard)
        number += 1
    await asyncio.gather(*asking)
    for client in idle:
        client.close()
    return found(times, statuses, time.perf_counter() - started)


def found(times: list[float], statuses: Counter[int], seconds: float) -> dict[str, Any]:
    """Throughput and latency of what was answered."""
    times.sort()
    at = lambda share: 1e3 * times[min(len(times) - 1, int(share * len(times)))] if times else None  # noqa: E731
    return {
        "answered": len(times), "per_second": len(times) / seconds, "p50": at(0.5), "p99": at(0.99),
        "statuses": {str(status): count for status, count in sorted(statuses.items())}, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    """Read the plan, ask, print."""
    plan = json.loads(sys.argv[1])
    with open(plan["bodies"], encoding="utf-8") as file:
        bodies = [json.dumps(each).encode() for each in json.load(file)]
    loop = open_loop if "rate" in plan else closed_loop
    print(json.dumps(asyncio.run(loop(plan, bodies))))


if __name__ == "__main__":
    main()
