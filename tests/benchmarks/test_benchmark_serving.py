from __future__ import annotations

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from benchmarks.serving import ALONE, CLIENTS, LIT, OURS, run, to_markdown
from benchmarks.serving_load import closed_loop, found, open_loop
from benchmarks.study import Rows


@contextmanager
def answering(status):
    """The port of a server that answers everything alike."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("status", [200, 429])
def test_clients_count_what_they_are_answered(status):
    with answering(status) as port:
        plan = {"port": port, "path": "/", "seconds": 0.2}
        closed = asyncio.run(closed_loop({**plan, "clients": 3}, [b"one", b"two"]))
        opened = asyncio.run(open_loop({**plan, "rate": 100.0}, [b"one"]))
    for row in (closed, opened):
        assert set(row["statuses"]) == {str(status)} and row["statuses"][str(status)] > 3
        assert row["answered"] == (row["statuses"]["200"] if status == 200 else 0)


def test_tables_have_ratios_within_rounds():
    rates = {OURS: 400.0, ALONE: 100.0, LIT: 200.0}
    rows = {
        name: {str(clients): [{"per_second": rate, "p50": 1.0, "p99": 2.0, "cpu_ms": 3.0}] for clients in CLIENTS}
        for name, rate in rates.items()
    }
    parts = {"throughput": {"error": None, "services": rows}, "losses": {"error": "it failed"}}
    text = to_markdown({"benchmark": "serving", "quick": True, "environment": _environment(), "parts": parts})
    assert "| knowable | 64 | 400 | 1 | 2 | 3 | 4.00 | – | 2.00 | 1.00 | – | 1.00 |" in text and "it failed" in text


def _environment():
    from benchmarks.environment import Environment

    return Environment.now(()).to_dict()


def test_latencies_are_quantiles():
    row = found([0.001 * k for k in range(1, 101)], Counter({200: 100}), 2.0)
    assert row["per_second"] == 50.0 and row["p50"] == pytest.approx(51.0) and row["p99"] == pytest.approx(100.0)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_quick_study_fills_its_tables():
    made = run(quick=True, only="settled", rows=Rows())
    assert made["parts"]["settled"]["error"] is None and "same label" in to_markdown(made)
