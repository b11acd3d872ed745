"""Laplace approximations of networks with very many outputs, under a limit on memory.

A last layer for 1,000 classes, and a small network that labels every pixel of an image. Each contender fits and then
predicts in a process of its own, which may take a few GiB more than what it has once everything is imported and built:
what it takes is measured, and where it asks for more than that, its error is the answer.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.laplace import PACKAGES, Job, Peer, our_posterior, their_posterior, their_probs
from benchmarks.memory import _release, _reset_high_water_mark, _status
from benchmarks.networks import Network
from benchmarks.study import Rows, describe, own_process, page, say, table

LIMIT = 4 * 2**30
_TIMEOUT = 100.0
_HEADER = ("contender", "fit s", "fit MB", "prediction s", "prediction MB")
_BACKENDS = ("CurvlinopsGGN", "AsdlGGN", "BackPackGGN")
_BATCH = 50  # rows at a time in a fit of laplace-torch
_DRAWS = 32  # of the linearised network


@dataclass(frozen=True)
class Task:
    """A network with many outputs, and how much of it there is to do.

    Attributes:
        title: What the table says.
        last_layer: Whether only the last layer's weights are random.
        rows: Rows of a fit.
        inputs: Rows of a prediction.
        size: Classes of the last layer, or pixels along the side of an image.
    """

    title: str
    last_layer: bool
    rows: int
    inputs: int
    size: int

    def network(self) -> nn.Module:
        """A hidden layer in front of the classes, or three convolutions."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if self.last_layer:
                return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, self.size))
            layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(16, 8, 1))

    def data(self, rows: int) -> tuple[Tensor, Tensor]:
        """Noise, with labels of rows or of pixels."""
        generator = torch.Generator().manual_seed(1)
        if self.last_layer:
            x = torch.randn(rows, 64, generator=generator)
            return x, torch.randint(self.size, (rows,), generator=generator)
        x = torch.randn(rows, 3, self.size, self.size, generator=generator)
        return x, torch.randint(8, (rows, self.size, self.size), generator=generator)

    def job(self, structure: str) -> Job:
        """The same in the words of the other tables."""
        shape = self.data(1)[0].shape[1:]
        return Job(Network(self.title, lambda layers: self.network(), tuple(shape), 1), structure, self.last_layer)


TASKS = {
    "classes": Task("Last layer 512-1,000", True, 2_000, 100, 1_000),
    "segmentation": Task("Three convolutions, 8 classes for each of 64x64 pixels", False, 200, 20, 64),
}
_QUICK = {
    "classes": Task("Last layer 512-20", True, 40, 4, 20),
    "segmentation": Task("Three convolutions, 8 classes for each of 6x6 pixels", False, 6, 2, 6),
}


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """A process for each contender of each task; what is finished is not run again."""
    found: dict[str, dict[str, Any]] = {}
    for name in (name for name in TASKS if fnmatch(name, only)):
        found[name] = {}
        for contender in contenders(quick=quick):
            key = f"{name} {contender} {quick}"
            arguments = [name, contender, *(["--quick"] * quick)]
            row = rows.get(key) or rows.add(key, own_process(__name__, arguments, timeout=_TIMEOUT))
            say(f"{name}, {contender}: {row}")
            found[name][contender] = row
    return describe("laplace_limits", quick=quick, packages=PACKAGES, limit=LIMIT, tasks=found)


def contenders(*, quick: bool) -> list[str]:
    """Both sides with each structure; laplace-torch with each of its backends."""
    backends = _BACKENDS[:1] if quick else _BACKENDS
    ours = [f"knowable {structure}" for structure in ("kron", "diag")]
    return ours + [f"laplace-torch {structure} {backend}" for structure in ("kron", "diag") for backend in backends]


# --- the process that is measured ------------------------------------------------------------------------------------


def work(task: Task, contender: str, limit: int) -> dict[str, Any]:
    """Fit, and predict if there was a fit: seconds and MB of each, or why not."""
    side, structure, *backend = contender.split()
    fit, predict = our_steps(task, structure) if side == "knowable" else their_steps(task, structure, backend[0])
    limit_memory(limit)
    posterior, fitted = measured(fit)
    if "error" in fitted:
        return {"fit": fitted}
    probs, predicted = measured(lambda: predict(posterior))
    if "error" in predicted:
        return {"fit": fitted, "prediction": predicted}
    wanted = (task.inputs, *task.network()(task.data(1)[0]).shape[1:])
    whole = tuple(probs.shape) == wanted and bool(torch.isfinite(probs).all())
    wrong = {"error": f"gave {tuple(probs.shape)} where {wanted} was asked for"}
    return {"fit": fitted, "prediction": predicted if whole else wrong}


def our_steps(task: Task, structure: str) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
    """A fit, and a prediction from what it returns; everything is imported and built before."""
    import knowable  # noqa: F401

    job, net, data = task.job(structure), task.network(), task.data(task.rows)

    def predict(posterior: Any) -> Tensor:
        return posterior.predict(data[0][: task.inputs], samples=_DRAWS).probs

    return lambda: our_posterior(job, net, *data), predict


def their_steps(task: Task, structure: str, backend: str) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
    """The same by laplace-torch, which predicts one input at a time: the least memory it can do with."""
    import laplace  # type: ignore[import-not-found]  # noqa: F401

    job, net, data = task.job(structure), task.network(), task.data(task.rows)

    def predict(posterior: Any) -> Tensor:
        return their_probs(posterior, data[0][: task.inputs], 1)

    return lambda: their_posterior(job, Peer(backend, _BATCH), net, *data), predict


def limit_memory(more: int) -> None:
    """Let this process map ``more`` bytes than it has mapped by now, and not a byte beyond."""
    most = int(_status("VmSize") * 1e6) + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def measured(function: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result with the seconds and the MB above what was there before, or None with the error."""
    _release()
    before = _status("VmRSS")
    _reset_high_water_mark()
    begun = time.perf_counter()
    try:
        result = function()
    except Exception as error:
        return None, {"error": one_line(error)}
    seconds = time.perf_counter() - begun
    return result, {"seconds": round(seconds, 3), "peak": round(_status("VmHWM") - before, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description="One contender, as a line of JSON.")
    parser.add_argument("task")
    parser.add_argument("contender")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    try:
        tasks = _QUICK if given.quick else TASKS
        print(json.dumps(work(tasks[given.task], given.contender, LIMIT)))
    except Exception as error:
        print(json.dumps({"error": one_line(error)}))


# --- the tables ------------------------------------------------------------------------------------------------------


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each task."""
    tasks = _QUICK if run["quick"] else TASKS
    parts = []
    for name, rows in run["tasks"].items():
        task = tasks[name]
        title = f"{task.title}: fit to {task.rows:,} rows, linearised prediction for {task.inputs:,}"
        note = f"Each in a process that may take {run['limit'] / 2**30:g} GiB more than what it began with."
        parts.append(table(title, _HEADER, [_cells(contender, row) for contender, row in rows.items()], note))
    return page(run, *parts)


def _cells(contender: str, row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [contender, f"failed: {row['error']}"]
    found = [contender]
    for step in ("fit", "prediction"):
        what = row.get(step, {"error": "no fit"})
        if "error" in what:
            return [*found, f"failed: {what['error']}"]
        found += [f"{what['seconds']:.3g}", f"{what['peak']:.0f}"]
    return found


if __name__ == "__main__":
    sys.exit(main())
