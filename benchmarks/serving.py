"""A posterior behind HTTP on this machine: throughput, latency, settled draws, overload and lost workers.

The model is a mean-field posterior of a network with 55,000 weights on handwritten digits. Clients are a process of
their own (``serving_load``). Every service has one worker with one thread:

- ``knowable``: ``knowable serve`` as it is, which batches requests and stops drawing when a label is settled;
- ``knowable, 64 draws``: the same with ``epsilon`` 0, so that every row takes all draws;
- ``one at a time``: the same with 64 draws, and each request computed by itself;
- ``LitServe`` and ``LitServe, one at a time``: the same posterior and 64 draws behind LitServe, with batches of up to
  64 requests (2 ms to collect them), and without, where LitServe is installed.

All services are up at once and take turns. ``CPU`` is what a request costs the processes of a service in CPU time,
which says more than the clock on a machine that has other things to do.

**Settled** compares, row by row and within the process, a prediction that stops with one of 64 draws: the time of rows
that settle before all draws are taken, and how many labels are the same, over test rows with more and more noise.

**Overload** sends requests of 100 rows at ten times the rate at which they can be answered. **Losses** ends a worker,
and then the service, while 64 clients ask.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from torch import nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, child_environment, describe, page, say, table

OURS, FIXED, ALONE = "knowable", "knowable, 64 draws", "one at a time"
LIT, LIT_ALONE = "LitServe", "LitServe, one at a time"
CLIENTS = (1, 8, 64)
DRAWS, TRAINING = 64, 1400
_FIGURES, _REFERENCES = ("per_second", "p50", "p99", "cpu_ms"), (ALONE, LIT_ALONE, LIT)


def fit(folder: Path, quick: bool) -> Path:
    """Fit the posterior and save it."""
    import knowable as kn

    data = kn.datasets.digits()
    order = torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[:TRAINING]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    method = kn.MeanFieldVI(epochs=3 if quick else 300)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
        posterior = method.fit(kn.Model(net, kn.Categorical()), (data.x[order], data.y[order]), progress=False)
    posterior.save(folder / "posterior")
    return folder / "posterior"


def test_rows(noises: int) -> torch.Tensor:
    """Digits that were not trained on, with no noise and with more and more."""
    import knowable as kn

    data, generator = kn.datasets.digits(), torch.Generator().manual_seed(0)
    x = data.x[torch.randperm(len(data.x), generator=torch.Generator().manual_seed(0))[TRAINING:]]
    scales = torch.linspace(0, 0.4, noises)
    return torch.cat([x + scale * torch.randn(x.shape, generator=generator) for scale in scales])


# --- services --------------------------------------------------------------------------------------------------------

_ALONE = """
import sys
from pathlib import Path
import knowable.interfaces.serve.served as served
from knowable.interfaces.serve.rows import Limits
from knowable.interfaces.serve.server import run
run(served.Source(Path(sys.argv[1]), threads=1), host="127.0.0.1", port=int(sys.argv[2]), workers=1, token=None,
    limits=Limits(), together=1)
"""


class Service:
    """A service that runs, and the processes of it."""

    def __init__(self, name: str, run: Path, *options: str):
        self.name, self.epsilon = name, 0.001 if name == OURS else 0
        self.port = free_port()
        if name in (LIT, LIT_ALONE):
            command = ["-m", "benchmarks.serving_litserve", str(run), str(self.port), "64" if name == LIT else "1"]
        elif name == ALONE:
            command = ["-c", _ALONE, str(run), str(self.port)]
        else:
            command = ["-m", "knowable", "serve", str(run), "--port", str(self.port), *options]
        environment = {**child_environment(tempfile.gettempdir()), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def ready(self) -> None:
        """Wait until it answers."""
        end, path = time.monotonic() + 300, "health" if self.name in (LIT, LIT_ALONE) else "ready"
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with code {self.process.returncode}")
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{self.name} does not start")

    def asked(self, bodies: Path, **plan: Any) -> dict[str, Any]:
        """What clients see, and what it cost."""
        before = self.cpu()
        plan = {"port": self.port, "path": "/predict", "bodies": str(bodies), **plan}
        command = [sys.executable, "-m", "benchmarks.serving_load", json.dumps(plan)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        row["cpu_ms"] = 1e3 * (self.cpu() - before) / max(1, row["answered"])
        return row

    def tree(self) -> list[int]:
        """Numbers of its processes."""
        found, pending = [], [self.process.pid]
        while pending:
            pid = pending.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    pending += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
        return found

    def cpu(self) -> float:
        """CPU seconds of all of them so far."""
        total = 0.0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total

    def memory(self) -> float:
        """Megabytes that are its own: proportional share of what processes share."""
        total = 0
        for pid in self.tree():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        return total / 1024

    def end(self) -> None:
        """End it and all its processes."""
        pids = self.tree()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    """A port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return door.getsockname()[1]


@contextlib.contextmanager
def running(names: list[str], run: Path, *options: str) -> Iterator[dict[str, Service]]:
    """Services that run as long as the block; those that do not start are left out."""
    services = {name: Service(name, run, *options) for name in names}
    try:
        for name in names:
            try:
                services[name].ready()
            except (RuntimeError, TimeoutError) as error:
                say(one_line(error))
                services.pop(name).end()
        yield services
    finally:
        for service in services.values():
            service.end()


def bodies_of(folder: Path, rows: torch.Tensor, each: int, epsilon: float) -> Path:
    """A file of requests."""
    made = [
        {"rows": [[round(v, 4) for v in row] for row in part.tolist()], "epsilon": epsilon} for part in rows.split(each)
    ]
    path = folder / f"bodies-{each}-{epsilon:g}.json"
    path.write_text(json.dumps(made))
    return path


# --- what is measured ------------------------------------------------------------------------------------------------


def throughput(folder: Path, run: Path, quick: bool) -> dict[str, Any]:
    """Every service with 1, 8 and 64 clients, in turns; ratios are within a round."""
    rounds, seconds = (1, 1.0) if quick else (3, 4.0)
    rows = test_rows(1)
    found: dict[str, Any] = {}
    with running([OURS, FIXED, ALONE, LIT, LIT_ALONE], run) as services:
        for name, service in services.items():
            service.asked(bodies_of(folder, rows, 1, service.epsilon), clients=8, seconds=0.5)
            found[name] = {str(clients): [] for clients in CLIENTS}
        for number in range(rounds):
            for clients in CLIENTS:
                order = list(services.values())
                for service in order[number % len(order) :] + order[: number % len(order)]:
                    bodies = bodies_of(folder, rows, 1, service.epsilon)
                    row = service.asked(bodies, clients=clients, seconds=seconds)
                    found[service.name][str(clients)].append(row)
                    say(f"{service.name}, {clients} clients: {row}")
    return {"error": None, "services": found}


def settled(run: Path, quick: bool) -> dict[str, Any]:
    """Rows one by one: time with and without stopping, and how many labels are the same."""
    import knowable as kn
    from knowable.interfaces.serve.settled import Draws

    torch.set_num_threads(1)
    x = test_rows(2 if quick else 26)
    draws = Draws(kn.load(run), DRAWS, block=32)

    def predict(rows: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        labels, taken = (torch.zeros(len(rows), dtype=torch.long) for _ in range(2))
        for piece in draws.predict(rows, most=DRAWS, epsilon=epsilon, level=0.9):
            labels[piece.rows], taken[piece.rows] = piece.prediction.labels, piece.draws
        return labels, taken

    def timed(row: torch.Tensor, epsilon: float) -> float:
        started = time.process_time()
        predict(row, epsilon)
        return time.process_time() - started

    parts = [(predict(part, 0.001), predict(part, 0.0)) for part in x.split(512)]
    stopped, taken, fixed = (torch.cat([part[a][b] for part in parts]) for a, b in ((0, 0), (0, 1), (1, 0)))
    early = taken < DRAWS
    some = x[early][:: max(1, int(early.sum()) // (20 if quick else 300))]
    pairs = [(timed(row, 0.0), timed(row, 0.001)) for row in some.split(1)]
    ratios = [long / short for long, short in pairs]
    return {
        "error": None, "rows": len(x), "same": (stopped == fixed).double().mean().item(),
        "same_settled": (stopped == fixed)[early].double().mean().item(), "settled": early.double().mean().item(),
        "draws": taken.double().mean().item(), "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4), "draws_of_settled": taken[early].double().mean().item(),
        "together": sum(long for long, _ in pairs) / sum(short for _, short in pairs),
    }  # fmt: skip


def overload(folder: Path, run: Path, quick: bool) -> dict[str, Any]:
    """Ten times what it can answer, then one client again."""
    seconds = 2.0 if quick else 15.0
    rows = test_rows(2)
    with running([FIXED], run, "--max-rows", "500") as services:
        service = services[FIXED]
        large, small = bodies_of(folder, rows, 100, 0), bodies_of(folder, rows, 1, 0)
        capacity = service.asked(large, clients=4, seconds=seconds / 3)
        before = service.asked(small, clients=1, seconds=seconds / 5)
        start = service.memory()
        rate = 10 * capacity["per_second"]
        plan = {"port": service.port, "path": "/predict", "bodies": str(large), "rate": rate, "seconds": seconds}
        clients = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving_load", json.dumps(plan)], stdout=subprocess.PIPE, text=True
        )
        peak = start
        while clients.poll() is None:
            peak = max(peak, service.memory())
            time.sleep(0.3)
        during = json.loads(clients.communicate()[0])
        after = service.asked(small, clients=1, seconds=seconds / 5)
        return {
            "error": None, "capacity": capacity["per_second"], "rate": rate, "during": during, "before": before,
            "after": after, "memory": {"before": start, "peak": peak, "after": service.memory()},
        }  # fmt: skip


def losses(folder: Path, run: Path, quick: bool) -> dict[str, Any]:
    """A worker is killed, and then the service is told to end, while 64 clients ask."""
    seconds = 4.0 if quick else 20.0
    found: dict[str, Any] = {"error": None}
    bodies = bodies_of(folder, test_rows(1), 1, 0.001)
    for loss in ("SIGKILL to a worker", "SIGTERM to the service"):
        with running([OURS], run, "--workers", "2") as services:
            service = services[OURS]
            plan = {
                "port": service.port, "path": "/predict", "bodies": str(bodies), "clients": 64, "seconds": seconds,
                "leave": True,
            }  # fmt: skip
            clients = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.serving_load", json.dumps(plan)], stdout=subprocess.PIPE, text=True
            )
            time.sleep(seconds / 3)
            with urlopen(f"http://127.0.0.1:{service.port}/ready") as answer:
                pids = json.load(answer)["pids"]
            os.kill(
                pids[0] if "worker" in loss else service.process.pid,
                signal.SIGKILL if "worker" in loss else signal.SIGTERM,
            )
            found[loss] = json.loads(clients.communicate()[0])
    return found


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All parts; ``only`` is a glob of their names. Finished parts are not run again."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="serving-") as name:
        folder, fitted = Path(name), list[Path]()

        def model() -> Path:
            if not fitted:
                fitted.append(fit(folder, quick))
            return fitted[0]

        parts = {
            "settled": lambda: settled(model(), quick),
            "throughput": lambda: throughput(folder, model(), quick),
            "overload": lambda: overload(folder, model(), quick),
            "losses": lambda: losses(folder, model(), quick),
        }
        for part, make in parts.items():
            if not fnmatch(part, only):
                continue
            key = part + ", quick" * quick
            row = rows.get(key)
            if row is None:
                try:
                    row = make()
                except Exception as error:
                    row = {"error": one_line(error)}
                say(f"{key}: {row}")
                rows.add(key, row)
            found[part] = row
    return describe("serving", quick=quick, packages=("uvicorn", "fastapi", "litserve"), parts=found)


# --- tables ----------------------------------------------------------------------------------------------------------


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each part."""
    tables = {"throughput": _throughput, "settled": _settled, "overload": _overload, "losses": _losses}
    made = []
    for name, row in run["parts"].items():
        failed = row["error"] is not None
        made.append(table(name.capitalize(), ["failed"], [[row["error"]]]) if failed else tables[name](row))
    return page(run, *made)


def _throughput(row: Mapping[str, Any]) -> str:
    per = ("requests a second", "p50 ms", "p99 ms", "CPU ms")
    header = ("service", "clients", *per, *(f"{what} {other}" for what in ("over", "CPU of") for other in _REFERENCES))
    lines, services = [], row["services"]
    for clients in map(str, CLIENTS):
        for name, runs in services.items():
            figures = [statistics.median(each[key] or 0.0 for each in runs[clients]) for key in _FIGURES]
            over = [
                _ratio(key, runs[clients], services[other][clients]) if other in services else "–"
                for key in ("per_second", "cpu_ms")
                for other in _REFERENCES
            ]
            lines.append([name, clients, f"{figures[0]:.0f}", *(f"{each:.3g}" for each in figures[1:]), *over])
    note = (
        "Medians over rounds in which all services take turns. Over: ratio of requests a second in the same round. CPU "
        "of: how many times the CPU time of a request the other one takes, in the same round."
    )
    return table("Throughput and latency", header, lines, note)


def _ratio(key: str, ours: list[Any], theirs: list[Any]) -> str:
    """Throughput over theirs, or their CPU time over ours, within the rounds."""
    pairs = zip(ours, theirs, strict=True) if key == "per_second" else zip(theirs, ours, strict=True)
    return f"{statistics.median(a[key] / max(b[key], 1e-9) for a, b in pairs):.2f}"


def _settled(row: Mapping[str, Any]) -> str:
    header = (
        "rows",
        "settled before 64 draws",
        "mean draws",
        "of settled rows",
        "time of 64 draws over that of settled rows",
        "of all of them together",
        "same label",
        "of settled rows",
    )
    low, _, high = row["quartiles"]
    cells = [
        row["rows"], f"{row['settled']:.1%}", f"{row['draws']:.1f}", f"{row['draws_of_settled']:.1f}",
        f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})", f"{row['together']:.2f}",
        f"{row['same']:.3%}", f"{row['same_settled']:.3%}",
    ]  # fmt: skip
    return table(
        "Settled draws",
        header,
        [cells],
        "Epsilon 0.001. Times are of requests of one row that settle: CPU time, median and quartiles."
        + row.get("measured", ""),
    )


def _overload(row: Mapping[str, Any]) -> str:
    header = ("", "requests a second", "answered", "shed (429, 503)", "other", "p50 ms", "p99 ms")
    lines = []
    for name, each in (
        ("one client before", row["before"]),
        ("ten times too many", row["during"]),
        ("one client after", row["after"]),
    ):
        counts = each["statuses"]
        shed = sum(counts.get(status, 0) for status in ("429", "503"))
        lines.append(
            [name, f"{sum(counts.values()) / each['seconds']:.1f}", counts.get("200", 0), shed,
             sum(counts.values()) - counts.get("200", 0) - shed, f"{each['p50']:.3g}", f"{each['p99']:.3g}"]
        )  # fmt: skip
    memory = row["memory"]
    note = (
        f"Requests of 100 rows at 64 draws, of which {row['capacity']:.1f} a second can be answered. Memory of all "
        f"processes: {memory['before']:.0f} MB before, {memory['peak']:.0f} MB at most, {memory['after']:.0f} MB after."
    )
    return table("Overload", header, lines, note)


def _losses(row: Mapping[str, Any]) -> str:
    header = ("what was done under load", "answered", "lost", "others")
    lines = []
    for name, each in row.items():
        if name != "error":
            counts = dict(each["statuses"])
            lines.append([name, counts.pop("200", 0), counts.pop("0", 0), json.dumps(counts)])
    note = "Lost: accepted, and the connection ended without an answer. -1 among the others: the door was closed."
    return table("Losses", header, lines, note)
