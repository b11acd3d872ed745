"""The lab's addresses: the page, a stream of pictures for what it shows, answers to its buttons, the Python."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from knowable._version import __version__
from knowable.core.support.checks import check_choice
from knowable.errors import InvalidArgument, InvalidType, KnowableError
from knowable.interfaces.lab.actions import ACTIONS
from knowable.interfaces.lab.fitting import Fit
from knowable.interfaces.lab.methods import JUDGES, MOST_METHODS, OFFERS, offer_of
from knowable.interfaces.lab.picture import CURVE, MAP, as_line
from knowable.interfaces.lab.pool import Pool, Task
from knowable.interfaces.lab.presets import presets
from knowable.interfaces.lab.problem import ACTIVATIONS, MOST_CLASSES, MOST_DEPTH, MOST_POINTS, MOST_WIDTH, Problem
from knowable.interfaces.lab.script import script
from knowable.interfaces.serve.guard import Bodies, Counters, Guard, problem, refused
from knowable.interfaces.serve.rows import Limits, Refused

_BODY = 256 * 1024  # bytes
_ALIVE = 1.0  # seconds after which the page hears something, so that it knows that we are there
_PARTS = ("page.css", "drawing.js", "state.js", "panels.js", "page.js")


def make_app(pool: Pool, *, token: str | None = None) -> Guard:
    """The application.

    Args:
        pool: Where fits are done.
        token: What clients must know, or None.
    """
    app = FastAPI(title="knowable lab", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    bodies = Bodies(Limits(rows=1, body=_BODY, waiting=1, seconds=10.0))
    boot, page = uuid.uuid4().hex, _page()
    app.add_exception_handler(Refused, refused)
    app.add_exception_handler(KnowableError, _wrong)
    app.add_exception_handler(HTTPException, _not_there)

    async def read(request: Request) -> Mapping[str, Any]:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise Refused(415, "The body must be application/json.")
        async with bodies.of(request) as body:
            try:
                found = json.loads(body)
            except ValueError as error:
                raise Refused(400, f"The body is not JSON: {error}.") from None
        if not isinstance(found, Mapping):
            raise InvalidType(f"The body must be an object, got {type(found).__name__}.")
        return found

    @app.post("/fit")
    async def fit(request: Request) -> Response:
        """Pictures of every method as they come, a line each, until all have ended."""
        given = await read(request)
        asked = fits_of(given)
        tasks = {slot: pool.fit(each) if isinstance(each, Fit) else each for slot, each in asked.items()}
        return StreamingResponse(_pictures(pool, tasks, boot), media_type="application/x-ndjson")

    @app.post("/act")
    async def act(request: Request) -> Response:
        """The answer to a button."""
        given = await read(request)
        action = check_choice("action", given.get("action"), tuple(ACTIONS))
        whole = Problem.read(given.get("problem"))
        method, judge = given.get("method"), given.get("judge")
        offer_of(method, whole)
        more = {name: given[name] for name in ("point", "epsilon", "risk", "beta") if given.get(name) is not None}
        reference = None if judge is None else Fit(whole, _judge(judge, whole), judge=True)
        task = pool.ask(action, Fit(whole, str(method)), more, reference)
        event = pool.watch(task)
        try:
            while not task.ended:
                event.clear()
                await event.wait()
        finally:
            pool.leave(task, event)
        return Response(task.line, 200 if task.state == "done" else 422, media_type="application/json")

    @app.post("/script")
    async def python(request: Request) -> Response:
        """The Python that does the same."""
        given = await read(request)
        whole = Problem.read(given.get("problem"))
        names = [str(each) for each in given.get("methods") or []]
        for each in names:
            offer_of(each, whole)
        return PlainTextResponse(script(whole, names))

    @app.get("/health")
    async def health() -> Response:
        """Whether the lab runs."""
        return JSONResponse({"status": "alive", "boot": boot})

    @app.get("/")
    async def front() -> Response:
        """The page."""
        return HTMLResponse(page)

    return Guard(app, token=token, counters=Counters(), paths=frozenset(("/", "/fit", "/act", "/script", "/health")))


def fits_of(given: Mapping[str, Any]) -> dict[str, Fit | str]:
    """What is to be fitted, by its place on the page; a sentence where a method is not for this problem."""
    whole = Problem.read(given.get("problem"))
    names = given.get("methods")
    if not isinstance(names, list) or not 1 <= len(names) <= MOST_METHODS:
        raise InvalidArgument(f"methods must be a list of 1 to {MOST_METHODS} names, got {str(names)[:80]}.")
    found: dict[str, Fit | str] = {}
    for place, name in enumerate(names):
        try:
            offer_of(name, whole)
            found[str(place)] = Fit(whole, name)
        except KnowableError as error:
            found[str(place)] = str(error)
    if given.get("judge") is not None:
        found["judge"] = Fit(whole, _judge(given["judge"], whole), judge=True)
    return found


def _judge(name: Any, whole: Problem) -> str:
    offer_of(name, whole, judge=True)
    return name


async def _pictures(pool: Pool, tasks: dict[str, Task | str], boot: str) -> AsyncIterator[bytes]:
    """The newest picture of each task; those that come while others are sent are skipped."""
    yield as_line({"boot": boot, "slots": list(tasks)})
    running: dict[str, tuple[Task, asyncio.Event]] = {}
    for slot, task in tasks.items():
        if isinstance(task, str):
            yield as_line({"slot": slot, "state": "failed", "error": task})
        else:
            running[slot] = task, pool.watch(task)
    every = dict(running)
    try:
        seen = dict.fromkeys(running, -1)
        while running:
            for slot, (task, event) in list(running.items()):
                event.clear()
                if task.version != seen[slot]:
                    seen[slot] = task.version
                    yield _line(slot, task)
                if task.ended:
                    del running[slot]
            if not running:
                break
            if not await _any(event for _, event in running.values()):
                yield as_line({"alive": True})
        yield as_line({"end": True})
    finally:
        for task, event in every.values():
            pool.leave(task, event)


async def _any(events: Iterable[asyncio.Event]) -> bool:
    """Wait until one of the events is set, or a little while; whether one is."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(waits, timeout=_ALIVE, return_when=asyncio.FIRST_COMPLETED)
    finally:  # when the page has left, too
        for each in waits:
            each.cancel()
    return bool(done)


def _line(slot: str, task: Task) -> bytes:
    """A task's line with its place on the page in front."""
    first = as_line({"slot": slot, "state": task.state})[:-2]
    return first + (b"," + task.line[1:] if task.line else b"}\n")


async def _wrong(request: Request, error: Exception) -> Response:
    return problem(422, str(error), request.state.request_id)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return problem(error.status_code, "There is nothing at this address.", request.state.request_id)


def _page() -> str:
    """The page, with its styles, its scripts, and what it has to know."""
    folder = resources.files("knowable.interfaces.lab").joinpath("page")
    style, *scripts = (folder.joinpath(name).read_text(encoding="utf-8") for name in _PARTS)
    offers = {name: {"label": each.label, "kind": each.kind, "uses": each.uses, "linear": each.linear}
              for name, each in OFFERS.items()}  # fmt: skip
    content = {
        "offers": offers, "judges": {name: each.label for name, each in JUDGES.items()}, "presets": presets(),
        "activations": list(ACTIVATIONS), "version": __version__, "curve": CURVE, "map": MAP,
        "most": {"points": MOST_POINTS, "width": MOST_WIDTH, "depth": MOST_DEPTH, "classes": MOST_CLASSES,
                 "methods": MOST_METHODS},
    }  # fmt: skip
    known = json.dumps(content).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    joined = "\n".join(scripts).replace("/*LAB*/null", known)
    return text.replace("/*STYLE*/", style).replace("/*SCRIPT*/", joined)
