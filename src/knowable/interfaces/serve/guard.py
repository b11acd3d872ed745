"""What stands before every request: its id, the token, the log, the counters, and answers in place of errors."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import re
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from knowable.interfaces.serve.batching import Busy
from knowable.interfaces.serve.rows import Limits, Refused

OPEN = ("/health",)
"""Addresses that need no token."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SAFE = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
     b"connect-src 'self'; img-src data:; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"),
]  # fmt: skip
_LOG = logging.getLogger("knowable.serve")
_BODIES = 8  # times the longest body, that all requests without an answer may have together


@dataclass
class Counters:
    """What ``/metrics`` tells."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("knowable_requests", "Requests answered.", ["path", "status"], **own)
        self.seconds = Histogram("knowable_request_seconds", "Seconds from request to answer.", ["path"], **own)
        self.rows = Counter("knowable_rows", "Rows predicted.", **own)
        self.draws = Counter("knowable_draws", "Posterior draws taken for them.", **own)
        self.refused = Counter("knowable_refused", "Requests turned away because of load.", ["status"], **own)
        self.waiting = Gauge("knowable_waiting_rows", "Rows that wait or are being computed.", **own)
        self.workers = Gauge("knowable_workers", "Workers that have the model.", **own)
        self.restarts = Gauge("knowable_worker_restarts", "Workers that were replaced.", **own)
        self.alarm = Gauge("knowable_stream_alarm", "1 when the stream has left the held-out rows.", **own)
        self.wealth = Gauge(
            "knowable_stream_log_wealth", "Log of the alarm's wealth; it is raised at -log delta.", **own
        )


class Guard:
    """Wraps the application.

    Args:
        app: The application.
        token: What a client must know; None: everybody may ask.
        counters: Where requests are counted.
        paths: The addresses there are, which alone are counted by name.
    """

    def __init__(self, app: Any, *, token: str | None, counters: Counters, paths: frozenset[str]):
        self.app, self._counters, self._paths = app, counters, paths
        self._token = None if token is None else _digest(token.encode())
        self.draining = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name: value for name, value in scope["headers"] if name in (b"x-request-id", b"authorization")}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        started, status = time.perf_counter(), 0

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(b"x-request-id", name.encode()), *_SAFE]
                if self.draining:
                    own.append((b"connection", b"close"))
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        try:
            if scope["path"] not in OPEN and not self._knows(headers.get(b"authorization", b"")):
                await _unauthorised(name)(scope, receive, answer)
            else:
                await self.app(scope, receive, answer)
        except (ClientDisconnect, asyncio.CancelledError):
            status = status or 499
            raise
        except Exception as error:
            _LOG.error("failed", exc_info=error, extra={"facts": {"request_id": name}})
            if not status:
                await problem(500, "The service failed. Its log has the cause under this request's id.", name)(
                    scope, receive, answer
                )
        finally:
            taken = time.perf_counter() - started
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._counters.requests.labels(path, str(status)).inc()
            self._counters.seconds.labels(path).observe(taken)
            facts = {"request_id": name, "method": scope["method"], "path": path, "status": status}
            said(
                "request", **facts, milliseconds=round(1e3 * taken, 2), **scope["state"].get("facts", {}),
                level=logging.DEBUG if path in ("/health", "/ready", "/metrics") else logging.INFO,
            )  # fmt: skip

    def _knows(self, header: bytes) -> bool:
        """Whether the header has the token: as a bearer, or as the password that a browser asks for."""
        if self._token is None:
            return True
        kind, _, rest = header.partition(b" ")
        if kind.lower() == b"basic":
            try:
                rest = base64.b64decode(rest, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                rest = b""
        elif kind.lower() != b"bearer":
            rest = b""
        return hmac.compare_digest(_digest(rest.strip()), self._token)


def _digest(token: bytes) -> bytes:
    """Tokens are compared by their hashes, so that the time tells nothing of their length either."""
    return hashlib.sha256(token).digest()


def problem(
    status: int, message: str, request_id: str, *, field: str | None = None, row: int | None = None,
    headers: dict[str, str] | None = None,
) -> Response:  # fmt: skip
    """An error as every address answers it."""
    content = {"error": message, "field": field, "row": row, "request_id": request_id}
    return JSONResponse(content, status, headers)


def _unauthorised(request_id: str) -> Response:
    offered = {"WWW-Authenticate": 'Bearer realm="knowable", Basic realm="knowable: the token is the password"'}
    return problem(401, "A token is needed: Authorization: Bearer TOKEN.", request_id, headers=offered)


def refused(request: Request, error: Exception) -> Response:
    """The answer in place of a request that is refused, or for which there is no room."""
    name = request.state.request_id
    if isinstance(error, Busy):
        return problem(error.status, error.message, name, headers={"Retry-After": str(error.seconds)})
    assert isinstance(error, Refused)
    return problem(error.status, error.message, name, field=error.field, row=error.row)


class Bodies:
    """Reads bodies: none that is too long or too slow, and not too many at a time."""

    def __init__(self, limits: Limits):
        self._limits, self._held = limits, 0

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request. It counts until the block ends, for what was made of it takes memory too.

        Raises:
            Refused: If it is too long, or does not come in time.
            Busy: If too much is held already.
        """
        most = self._limits.body
        said_length = request.headers.get("content-length", "")
        length = int(said_length) if said_length.isdecimal() and len(said_length) < 20 else most
        if length > most:
            raise _too_long(most)
        if self._held + length > _BODIES * most:
            raise Busy(429, "Too many bodies are being read. Come again.", 1)
        self._held += length
        try:
            body = await self._read(request)
            self._held, length = self._held + len(body) - length, len(body)
            yield body
        finally:
            self._held -= length

    async def _read(self, request: Request) -> bytes:
        found = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for part in request.stream():
                    found += part
                    if len(found) > self._limits.body:
                        raise _too_long(self._limits.body)
        except TimeoutError:
            raise Refused(408, f"The body did not come within {self._limits.seconds:g} s.") from None
        return bytes(found)


def _too_long(most: int) -> Refused:
    return Refused(413, f"The body may have {most:,} bytes at most.")


# --- the log: one JSON object a line ---------------------------------------------------------------------------------


def said(event: str, *, level: int = logging.INFO, **facts: Any) -> None:
    """Log what happened, with its facts."""
    _LOG.log(level, event, extra={"facts": facts})


class JSONLines(logging.Formatter):
    """Log records as JSON objects, with the cause of an error as text."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        content = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            content["cause"] = self.formatException(record.exc_info)
        return json.dumps(content, default=str)


def log_as_json(level: int = logging.INFO) -> None:
    """Write the service's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONLines())
    for name in ("knowable", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "knowable" else logging.WARNING)
