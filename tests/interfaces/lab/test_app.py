"""The lab's addresses: streams, shared and stopped fits, what is refused. Workers are stood in for."""

import asyncio
import contextlib
import json
import re

import httpx
import pytest

from knowable.interfaces.lab import pool as pools
from knowable.interfaces.lab.app import fits_of, make_app
from knowable.interfaces.lab.fitting import Fit, Question
from knowable.interfaces.lab.picture import as_line
from knowable.interfaces.lab.pool import Pool, Task, key_of
from tests.interfaces.lab.cases import POINTS, numbers
from tests.interfaces.lab.in_thread import at_a_port

BODY = {"problem": {"points": POINTS, "width": 4}, "methods": ["laplace", "map"], "judge": None}


class Hand:
    """In place of a worker: does what the test says."""

    def __init__(self, pool):
        self.pool, self.coming, self.stopping, self.gone = pool, False, False, False
        self.task, self.stopped = None, []

    @property
    def free(self):
        return self.task is None

    def start(self):
        """It is there."""

    def begin(self, task):
        self.task = task
        task.tell("running", b"")

    def ends(self, line=None, state="done"):
        task, self.task = self.task, None
        task.tell(state, line or as_line({"mean": [1.0]}))
        self.pool.go_on()

    def stop(self):
        self.stopped.append(self.task)
        self.task = None

    def kill(self):
        self.gone = True


@pytest.fixture
def hands(monkeypatch):
    monkeypatch.setattr(pools, "Worker", Hand)


def in_loop(work):
    """Run a coroutine function with a pool and a client."""

    async def run():
        pool = Pool()
        pool.open()
        transport = httpx.ASGITransport(app=make_app(pool))
        async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:
            try:
                return await work(pool, client)
            finally:
                pool.close()

    return asyncio.run(run())


async def until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come")


def test_the_page_is_whole_and_loads_nothing(hands):
    async def work(pool, client):
        answer = await client.get("/")
        text = answer.text
        assert answer.status_code == 200 and "/*" + "LAB*/" not in text and "/*" + "SCRIPT*/" not in text
        outside = re.findall(r"src=|@import|\burl\((?!#)|cdn|https?://(?!www\.w3\.org/2000/svg)", text.lower())
        assert outside == []  # url(#...) is a clip path of the page itself
        assert "connect-src 'self'" in answer.headers["content-security-policy"]
        assert (await client.get("/nothing")).status_code == 404
        health = (await client.get("/health")).json()
        assert health["status"] == "alive"

    in_loop(work)


def test_a_stream_has_every_picture_of_every_method_and_an_end(hands):
    async def work(pool, client):
        answer = asyncio.create_task(client.post("/fit", json=BODY))
        await until(lambda: sum(each.task is not None for each in pool.workers) == 2)
        for each in pool.workers:
            if each.task is not None:
                each.ends()
        lines = [json.loads(line) for line in (await answer).text.splitlines()]
        assert lines[0]["slots"] == ["0", "1"] and lines[-1] == {"end": True}
        done = [line for line in lines if line.get("state") == "done"]
        assert sorted(line["slot"] for line in done) == ["0", "1"] and all(line["mean"] == [1.0] for line in done)
        again = await client.post("/fit", json=BODY)  # known, and told at once
        assert [json.loads(line).get("state") for line in again.text.splitlines()][1:-1] == ["done", "done"]

    in_loop(work)


def test_a_method_that_does_not_fit_the_problem_fails_alone():
    rows = [[0.0, 0.0, 0], [1.0, 1.0, 1]]
    found = fits_of({"problem": {"task": "classes", "points": rows}, "methods": ["exact_linear", "map"]})
    assert "for numbers" in found["0"] and isinstance(found["1"], Fit)


def test_tabs_share_a_fit_and_it_stops_when_the_last_leaves(hands):
    async def work(pool, client):
        fit = Fit(numbers(), "laplace")
        one, two = pool.fit(fit), pool.fit(fit)
        assert one is two and sum(each.task is one for each in pool.workers) == 1
        worker = next(each for each in pool.workers if each.task is one)
        watching = [pool.watch(one), pool.watch(one)]
        pool.leave(one, watching[0])
        assert worker.stopped == []
        pool.leave(one, watching[1])
        assert worker.stopped == [one] and pool.fits == {}

    in_loop(work)


def test_settings_of_other_methods_do_not_make_another_fit():
    keys = {key_of(Fit(numbers(beta=beta, rate=rate), "laplace")) for beta in (1, 2) for rate in (0.1, 0.2)}
    assert len(keys) == 1
    assert len({key_of(Fit(numbers(beta=beta), "mean_field_vi")) for beta in (1, 2)}) == 2
    assert key_of(Fit(numbers(), "hmc")) != key_of(Fit(numbers(), "hmc", judge=True))


def test_what_waits_begins_when_a_worker_is_free_and_too_much_is_refused(hands, monkeypatch):
    monkeypatch.setattr(pools, "MOST_WORKERS", 1)
    monkeypatch.setattr(pools, "READY", 1)
    monkeypatch.setattr(pools, "MOST_WAITING", 2)

    async def work(pool, client):
        tasks = [pool.fit(Fit(numbers(seed=seed), "map")) for seed in range(3)]
        assert [task.state for task in tasks] == ["running", "waiting", "waiting"]
        answer = await client.post("/fit", json={**BODY, "methods": ["map"]})
        assert answer.status_code == 422 and "Too much" in answer.json()["error"]
        pool.workers[0].ends()
        assert [task.state for task in tasks] == ["done", "running", "waiting"]

    in_loop(work)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/fit", {**BODY, "methods": []}, 422, "methods must be a list"),
        ("/fit", {**BODY, "methods": ["map"] * 5}, 422, "1 to 4"),
        ("/fit", {**BODY, "judge": "nobody"}, 422, "judge"),
        ("/fit", {**BODY, "problem": {"points": []}}, 422, "no points"),
        ("/fit", [1], 422, "must be an object"),
        ("/act", {"action": "fly", "problem": BODY["problem"], "method": "map"}, 422, "action"),
        ("/act", {"action": "label", "problem": BODY["problem"], "method": "map"}, 422, "still being fitted"),
        ("/script", {"problem": BODY["problem"], "methods": ["magic"]}, 422, "method"),
    ],
)
def test_what_is_wrong_is_refused_with_a_sentence(path, body, status, said):
    async def work(pool, client):
        answer = await client.post(path, json=body)
        assert answer.status_code == status and said in answer.json()["error"]

    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(pools, "Worker", Hand)
        in_loop(work)


def test_bodies_that_are_no_json_or_too_long_are_refused(hands):
    async def work(pool, client):
        headers = {"content-type": "application/json"}
        assert (await client.post("/fit", content=b"{", headers=headers)).status_code == 400
        assert (await client.post("/fit", content=b"{}")).status_code == 415  # as a form of another site would send
        assert (await client.post("/fit", content=b" " * 300_000, headers=headers)).status_code == 413

    in_loop(work)


def test_a_question_is_asked_of_the_fit_that_is_shown(hands):
    async def work(pool, client):
        problem = numbers()
        task = pool.fit(Fit(problem, "map"))
        next(each for each in pool.workers if each.task is task).ends()
        asked = {"action": "evaluate", "problem": {"points": POINTS, "width": 4, "view": [-3, 3, -2, 2]},
                 "method": "map", "beta": 1.0}  # fmt: skip
        answer = asyncio.create_task(client.post("/act", json=asked))
        await until(lambda: any(each.task is not None for each in pool.workers))
        worker = next(each for each in pool.workers if each.task is not None)
        question = worker.task.content
        assert isinstance(question, Question) and question.fit.folder == task.content.folder
        assert question.given == {"beta": 1.0}
        worker.ends(as_line({"error": "no"}), "failed")
        assert (await answer).status_code == 422

    in_loop(work)


def test_a_task_keeps_its_newest_picture():
    task, event = Task(Fit(numbers(), "map")), asyncio.Event()
    task.watchers.add(event)
    task.tell("running", b"one\n")
    task.tell("done", b"")
    assert task.line == b"one\n" and task.version == 2 and task.ended and event.is_set()


def test_a_token_is_asked_for_where_there_is_one():
    async def run():
        pool = Pool()
        transport = httpx.ASGITransport(app=make_app(pool, token="a token of some length"))
        async with httpx.AsyncClient(transport=transport, base_url="http://lab") as client:
            assert (await client.get("/")).status_code == 401
            found = await client.get("/", headers={"authorization": "Bearer a token of some length"})
            assert found.status_code == 200
        pool.close()

    asyncio.run(run())


@pytest.mark.slow
def test_real_workers_fit_stop_and_are_replaced(monkeypatch):
    monkeypatch.setattr(pools, "READY", 1)
    with at_a_port() as address:
        body = {**BODY, "methods": ["infinite_width", "laplace"]}
        lines = [json.loads(line) for line in httpx.post(f"{address}/fit", json=body, timeout=120).text.splitlines()]
        assert [line["state"] for line in lines if line.get("state") == "done"] == ["done", "done"]
        asked = {"action": "evaluate", "problem": body["problem"], "method": "laplace"}
        assert len(httpx.post(f"{address}/act", json=asked, timeout=60).json()["point"]) == 2
        with httpx.stream("POST", f"{address}/fit", json={**BODY, "methods": ["mean_field_vi"]}, timeout=60) as stream:
            next(stream.iter_lines())  # and away: its fit is stopped
        done = httpx.post(f"{address}/fit", json={**body, "methods": ["map"]}, timeout=120)
        assert '"state":"done"' in done.text
