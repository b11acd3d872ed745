"""The service's addresses."""

from __future__ import annotations

import json
from functools import partial
from importlib import resources
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from knowable._version import __version__
from knowable.interfaces.serve.batching import Busy, Line
from knowable.interfaces.serve.guard import Bodies, Counters, Guard, problem, refused
from knowable.interfaces.serve.openapi import about_model, example_rows, operation, plain_operation
from knowable.interfaces.serve.rows import Ask, Description, Limits, Refused, read_ask
from knowable.interfaces.serve.watch import Watch

_LARGE = 64 * 1024  # bytes of a body, beyond which it is read in a thread, one at a time


def make_app(line: Line, about: Description, *, limits: Limits, token: str | None, counters: Counters) -> Guard:
    """The application for a line of workers that have the model.

    Args:
        line: Where requests are computed.
        about: The model.
        limits: How much may be asked.
        token: What clients must know, or None.
        counters: Where requests are counted.
    """
    app = FastAPI(
        title=f"knowable: {about.name}",
        version=__version__,
        summary="Predictions with calibrated uncertainty.",
        docs_url=None,
        redoc_url=None,
    )
    bodies, one_at_a_time = Bodies(limits), CapacityLimiter(1)
    watch = Watch(about.novelty, about.delta, counters, line.said) if about.novelty else None
    app.state.watch = watch
    for kind in (Refused, Busy):
        app.add_exception_handler(kind, refused)
    app.add_exception_handler(HTTPException, _not_there)

    async def read(request: Request, kind: str, body: bytes) -> Ask:
        media = request.headers.get("content-type", "")
        reading = partial(read_ask, kind, media, body, request.query_params, about, limits.rows_of(kind))
        return reading() if len(body) < _LARGE else await to_thread.run_sync(reading, limiter=one_at_a_time)

    async def answer(request: Request, kind: str) -> Response:
        if not line.workers:
            raise Busy(503, "No worker has the model yet. Come again.", 1)
        async with bodies.of(request) as body:
            ask = await read(request, kind, body)
            found = await line.ask(ask)
        predictions = found["predictions"]
        draws = sum(each.get("draws", 0) for each in predictions)
        counters.rows.inc(ask.count)
        counters.draws.inc(draws)
        request.state.facts = {"rows": ask.count, "draws": draws}
        if watch is not None:
            watch.add(found["novelty"])
        content = {name: value for name, value in found.items() if name != "novelty"}
        if kind == "predict" and about.abstain_bound is not None:
            content["abstain_bound"] = about.abstain_bound
        return _json({**content, "request_id": request.state.request_id})

    @app.post("/predict", openapi_extra=operation("predict", about, limits), response_class=JSONResponse)
    async def predict(request: Request) -> Response:
        """Predict rows, with the uncertainty of each."""
        return await answer(request, "predict")

    @app.post("/explain", openapi_extra=operation("explain", about, limits), response_class=JSONResponse)
    async def explain(request: Request) -> Response:
        """Predict rows, and say in words why each is uncertain."""
        return await answer(request, "explain")

    @app.get("/model", openapi_extra=plain_operation("What the model takes and predicts, and what is promised of it."))
    async def model() -> Response:
        """What the model takes and predicts."""
        return _json(about_model(about, limits))

    @app.get("/health", openapi_extra=plain_operation("The process is there.", token=False))
    async def health() -> Response:
        """Whether the service runs. It needs no token."""
        return _json({"status": "alive"})

    @app.get("/ready", openapi_extra=plain_operation("All workers have the model.", also=503))
    async def ready(request: Request) -> Response:
        """Whether all workers have the model."""
        state = {"ready": line.ready, "workers": len(line.workers), "pids": line.workers, "restarts": line.restarts}
        headers = {} if line.ready else {"Retry-After": "1"}
        return JSONResponse(state, 200 if line.ready else 503, headers)

    @app.get("/alarm", openapi_extra=plain_operation("Whether rows are still like the held-out ones.", also=404))
    async def alarm() -> Response:
        """Whether the rows that come are still like the held-out ones of the certificate."""
        if watch is None:
            raise HTTPException(404, "There is no alarm: the model has no certificate.")
        return _json(watch.state())

    @app.get("/metrics", openapi_extra=plain_operation("Counters for Prometheus.", media="text/plain"))
    async def metrics() -> Response:
        """Counters for Prometheus."""
        counters.waiting.set(line.waiting)
        counters.workers.set(len(line.workers))
        counters.restarts.set(line.restarts)
        return Response(generate_latest(counters.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/", openapi_extra=plain_operation("A page to try the model on.", media="text/html"))
    async def page() -> Response:
        """A page for people: type or paste rows, see predictions."""
        return HTMLResponse(_page(about, limits))

    paths = frozenset(getattr(route, "path", "") for route in app.routes)
    return Guard(app, token=token, counters=counters, paths=paths)


def _json(content: Any) -> Response:
    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail if error.detail != "Not Found" else "There is nothing at this address."
    return problem(error.status_code, message, request.state.request_id, headers=dict(error.headers or {}))


def _page(about: Description, limits: Limits) -> str:
    """The page, with what it has to know of the model in it."""
    text = resources.files("knowable.interfaces.serve").joinpath("page.html").read_text(encoding="utf-8")
    content = {**about_model(about, limits), "examples": example_rows(about)}
    safe = json.dumps(content).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return text.replace("/*MODEL*/null", safe)
