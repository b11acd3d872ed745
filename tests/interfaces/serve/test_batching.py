"""The line of requests: what is together, what is shed, and what happens when a worker dies or hangs."""

import asyncio
import threading

import pytest

from knowable.interfaces.serve.batching import Busy, Line
from knowable.interfaces.serve.rows import Ask, Description, Refused
from knowable.interfaces.serve.workers import CannotLoad, WorkerDied
from tests.interfaces.serve.in_process import LocalWorker


class Echo:
    """Answers with the number of rows, when it is let."""

    about = Description("echo", "Echo", "regression")

    def __init__(self):
        self.go = threading.Event()
        self.go.set()
        self.seen = []

    def answer(self, asks):
        self.go.wait(10)
        self.seen.append([ask.count for ask in asks])
        return [{"rows": ask.count} for ask in asks]


class Fragile(LocalWorker):
    """Dies at a request with 13 rows, as long as there is courage left."""

    deaths = 1

    def call(self, asks):
        found = super().call(asks)
        if any(ask.count == 13 for ask in asks) and Fragile.deaths > 0:
            Fragile.deaths -= 1
            self.kill()
            raise WorkerDied("it could not bear it")
        return found


def rows(count):
    return Ask("predict", {}, count)


async def opened(served, *, worker=LocalWorker, workers=1, **settings):
    made, said = [], []

    def start(source, number):
        made.append(worker(served, number))
        return made[-1]

    settings = {"rows": 100, "waiting": 1000, "seconds": 10.0, **settings}
    line = Line(None, workers=workers, start=start, said=lambda event, **facts: said.append(event), **settings)
    await line.open()
    return line, made, said


def test_what_comes_during_a_call_is_the_next_call_up_to_the_limit_of_rows():
    async def run():
        echo = Echo()
        line, _, _ = await opened(echo)
        echo.go.clear()
        asked = [asyncio.create_task(line.ask(rows(count))) for count in (1, 30, 30, 30, 30, 200)]
        await asyncio.sleep(0.05)
        echo.go.set()
        found = [(await each)["rows"] for each in asked]
        await line.close()
        return found, echo.seen

    found, seen = asyncio.run(run())
    assert found == [1, 30, 30, 30, 30, 200]
    assert sorted(count for batch in seen for count in batch) == [1, 30, 30, 30, 30, 200] and len(seen) <= 4
    assert all(sum(batch) <= 100 or len(batch) == 1 for batch in seen)


def test_a_full_line_sheds_and_says_when_to_come_again():
    async def run():
        echo = Echo()
        line, _, _ = await opened(echo, waiting=50)
        await line.ask(rows(10))
        echo.go.clear()
        asked = [asyncio.create_task(line.ask(rows(20))) for _ in range(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(Busy) as refused:
            await line.ask(rows(20))
        echo.go.set()
        await asyncio.gather(*asked)
        after = await line.ask(rows(20))
        await line.close()
        return refused.value, after, line.waiting

    refused, after, waiting = asyncio.run(run())
    assert refused.status == 429 and refused.seconds >= 1 and after == {"rows": 20} and waiting == 0


def test_a_line_that_would_take_longer_than_a_request_may_sheds():
    async def run():
        echo = Echo()
        line, _, _ = await opened(echo, seconds=0.5)
        line._pace = 10.0  # rows a second, so that 20 rows are 2 seconds
        echo.go.clear()
        first = asyncio.create_task(line.ask(rows(20)))
        await asyncio.sleep(0.02)
        with pytest.raises(Busy) as refused:
            await line.ask(rows(1))
        echo.go.set()
        await first
        await line.close()
        return refused.value

    refused = asyncio.run(run())
    assert refused.status == 429 and refused.seconds == 2


def test_a_worker_that_dies_is_replaced_and_its_work_done_again():
    async def run():
        Fragile.deaths = 1
        line, made, said = await opened(Echo(), worker=Fragile)
        found = await asyncio.gather(*(line.ask(rows(count)) for count in (5, 13, 7)))
        state = line.ready, line.restarts, len(made)
        await line.close()
        return found, state, said

    found, state, said = asyncio.run(run())
    assert [each["rows"] for each in found] == [5, 13, 7] and state == (True, 1, 2)
    assert "worker died" in said


def test_a_request_that_kills_every_worker_is_given_up_and_the_others_are_answered():
    async def run():
        Fragile.deaths = 100
        line, made, _ = await opened(Echo(), worker=Fragile)
        found = await asyncio.gather(*(line.ask(rows(count)) for count in (5, 13, 7)), return_exceptions=True)
        await line.close()
        return found, len(made)

    found, made = asyncio.run(run())
    assert found[0] == {"rows": 5} and found[2] == {"rows": 7}
    assert isinstance(found[1], Refused) and found[1].status == 503 and made == 4


def test_a_worker_that_dies_idle_is_noticed_and_the_line_is_not_ready_meanwhile():
    class Slow(LocalWorker):
        def await_model(self):
            if self.number_made:
                release.wait(10)
            return super().await_model()

        number_made = 0

        def __init__(self, served, number=0):
            super().__init__(served, number)
            self.number_made, Slow.number_made = Slow.number_made, Slow.number_made + 1

    release = threading.Event()

    async def run():
        line, made, _ = await opened(Echo(), worker=Slow)
        before = line.ready
        made[0].kill()
        while line.ready:
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(line.ask(rows(3)))
        release.set()
        found = await waiting
        after = line.ready, line.restarts
        await line.close()
        return before, found, after

    assert asyncio.run(asyncio.wait_for(run(), 20)) == (True, {"rows": 3}, (True, 1))


def test_a_worker_that_hangs_is_killed_and_clients_hear_in_time():
    class Hanging(LocalWorker):
        def call(self, asks):
            if self.number_made == 0:
                self.dead.wait(10)
                raise WorkerDied("it was killed")
            return super().call(asks)

        count = 0

        def __init__(self, served, number=0):
            super().__init__(served, number)
            self.number_made, Hanging.count = Hanging.count, Hanging.count + 1

    async def run():
        line, made, said = await opened(Echo(), worker=Hanging, seconds=0.2)
        with pytest.raises(Busy) as refused:
            await line.ask(rows(1))
        while len(made) < 2 or not line.ready:
            await asyncio.sleep(0.01)
        found = await line.ask(rows(2))
        await line.close()
        return refused.value.status, found, said

    status, found, said = asyncio.run(asyncio.wait_for(run(), 20))
    assert status == 503 and found == {"rows": 2} and "worker too slow" in said


def test_closing_finishes_what_was_accepted_and_takes_no_more():
    async def run():
        echo = Echo()
        line, _, _ = await opened(echo, workers=2)
        echo.go.clear()
        asked = [asyncio.create_task(line.ask(rows(60))) for _ in range(6)]
        await asyncio.sleep(0.05)
        closing = asyncio.create_task(line.close())
        await asyncio.sleep(0.05)
        with pytest.raises(Busy) as refused:
            await line.ask(rows(1))
        echo.go.set()
        found = await asyncio.gather(*asked)
        await closing
        return found, refused.value.status

    found, status = asyncio.run(run())
    assert [each["rows"] for each in found] == [60] * 6 and status == 503


def test_a_client_that_leaves_does_not_keep_its_place():
    async def run():
        echo = Echo()
        line, _, _ = await opened(echo)
        echo.go.clear()
        first = asyncio.create_task(line.ask(rows(1)))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(line.ask(rows(50)))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        waiting = line.waiting
        echo.go.set()
        await first
        await line.close()
        return waiting, echo.seen

    assert asyncio.run(run()) == (1, [[1]])


def test_a_model_that_cannot_be_loaded_ends_the_start():
    class Broken(LocalWorker):
        def await_model(self):
            raise CannotLoad("there is no such file")

    async def run():
        with pytest.raises(CannotLoad, match="no such file"):
            await opened(Echo(), worker=Broken, workers=2)

    asyncio.run(run())
