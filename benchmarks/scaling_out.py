"""Steps of fits in 1, 2 and 4 processes, beside what the cost model says.

The model of a step in W processes is that of one process on M / W rows and one message of P numbers:

    T(W) = max(1, W / cores) T(1 process, M / W rows) + T(message of P numbers, W)

Both terms on the right are measured by themselves, the sum is compared with the step. Processes are joined by gloo on
one machine. Times are the least of many, because other work on the machine only adds to them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing, nn

from benchmarks.study import Rows, describe, page, say, table

WORKERS = (1, 2, 4)
MESSAGES = {False: (1_000, 100_000, 1_000_000, 10_000_000), True: (100,)}
PROBLEMS = {  # name: width of the hidden layer, rows of a step
    False: {"small network": (32, 4096), "wide network": (1024, 4096), "wide network, few rows": (1024, 128)},
    True: {"small network": (4, 64)},
}
INPUTS = 64
METHODS = ("MeanFieldVI", "HMC")


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All measurements, for each number of processes in turn."""
    found: dict[str, Any] = {}
    for count in WORKERS:
        key = f"{count} {quick}"
        if rows.get(key) is None:
            rows.add(key, _measured(count, quick))
        found[str(count)] = rows.get(key)
        say(f"{count}: {found[str(count)]}")
    return describe("scaling_out", quick=quick, packages=(), cores=os.cpu_count(), found=found)


def _measured(count: int, quick: bool) -> dict[str, Any]:
    """What the first of so many processes measures."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        running = [context.Process(target=_process, args=(rank, count, folder, quick)) for rank in range(count)]
        for each in running:
            each.start()
        for each in running:
            each.join()
        try:
            return json.loads((Path(folder) / "found.json").read_text())
        except FileNotFoundError:
            return {"error": "a process failed"}


def _process(rank: int, count: int, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    found: dict[str, Any] = {"messages": {}, "steps": {}}
    for size in MESSAGES[quick]:
        numbers = torch.ones(size)
        found["messages"][str(size)] = least(lambda numbers=numbers: dist.all_reduce(numbers), 3 if quick else 20)
    for name, (hidden, batch) in PROBLEMS[quick].items():
        for method in METHODS:
            step, params = prepared(method, hidden, batch)
            found["steps"][f"{method}, {name}"] = {"seconds": least(step, 3 if quick else 20), "params": params}
            if count == 1:  # the same with the share of rows that one of several processes has
                for others in WORKERS[1:]:
                    share, _ = prepared(method, hidden, batch // others)
                    found["steps"][f"{method}, {name}"][f"share {others}"] = least(share, 3 if quick else 20)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def prepared(method: str, hidden: int, batch: int) -> tuple[Callable[[], object], int]:
    """A step of a method on a regression, and how many numbers its message has."""
    import knowable as kn
    from knowable.core.chains.target import ModelTarget
    from knowable.core.model.data import as_data
    from knowable.core.training.loop import TrainingRun
    from knowable.core.training.settings import TrainingSettings

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, INPUTS, generator=generator)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(INPUTS, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    model = kn.Model(net, kn.Gaussian(noise=0.1))
    data, engine = as_data((x, x.sum(1)), model), kn.engines.TorchDistributed()
    if method == "HMC":
        target = ModelTarget(model, data, points={}, buffers={}, processes=engine.processes, mode="traced")
        position = target.layout.flatten(model.params()).unsqueeze(0)
        return lambda: target.value_and_grad(position), position.numel()
    objective = kn.MeanFieldVI().objective(model, x, batch)
    training = TrainingRun(objective, data, TrainingSettings(epochs=10**6, batch_size=batch), None, 0, engine)
    (group,) = training.shares.groups(data.batches(batch), 1, 1)
    return lambda: training._one_step(group), objective.dimension


def least(step: Callable[[], object], rounds: int) -> float:
    """Seconds of the quickest of some calls."""
    for _ in range(3):
        step()
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        step()
        found.append(time.perf_counter() - begun)
    return min(found)


def predicted(found: Mapping[str, Any], name: str, workers: int, cores: int) -> float:
    """The cost model: the step of one process on its share of the rows, and a message."""
    alone = found["1"]["steps"][name]
    crowded = max(1.0, workers / cores)
    return crowded * alone[f"share {workers}"] + message(found[str(workers)]["messages"], alone["params"])


def message(measured: Mapping[str, float], numbers: int) -> float:
    """Seconds of a message, between the measured sizes in proportion."""
    sizes = sorted((int(size), seconds) for size, seconds in measured.items())
    if len(sizes) == 1 or numbers <= sizes[0][0]:
        return sizes[0][1]
    below = max(each for each in sizes[:-1] if each[0] <= numbers)
    above = min(each for each in sizes if each[0] > below[0])
    return below[1] + (above[1] - below[1]) * (numbers - below[0]) / (above[0] - below[0])


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table of messages, and one of steps beside the model."""
    found, cores = run["found"], run["cores"]
    if any("error" in each for each in found.values()):
        return page(run, "Failed.")
    several = [str(each) for each in WORKERS[1:]]
    sizes = found["1"]["messages"]
    messages = [[f"{int(size):,}", *(f"{1e3 * found[w]['messages'][size]:.2f}" for w in several)] for size in sizes]
    steps = []
    for name, alone in found["1"]["steps"].items():
        cells = [name, f"{alone['params']:,}", f"{1e3 * alone['seconds']:.2f}"]
        for w in several:
            cells += [
                f"{1e3 * found[w]['steps'][name]['seconds']:.2f}",
                f"{1e3 * predicted(found, name, int(w), cores):.2f}",
            ]
        steps.append(cells)
    header = ["step", "numbers", "1 process, ms"]
    header += [text for w in several for text in (f"{w} processes, ms", f"model, {w}")]
    return page(
        run,
        table(
            "Sum of so many numbers over the processes (gloo, one machine)",
            ["numbers", *(f"{w} processes, ms" for w in several)],
            messages,
        ),
        table("A step", header, steps, f"Least of 20 on {cores} cores, one thread a process."),
    )
