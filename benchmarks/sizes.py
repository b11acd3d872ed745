"""What knowable costs at ten million weights, and how its cost grows with weights, rows and draws.

Three kinds of rows, each in a process of its own:

- **steps**: a training step of `MaximumLikelihood`, `MAP`, `MeanFieldVI` and `NaturalVI` over that of the plain network
  with fused Adam; both, and the peers that are installed, take turns.
- **fits**: a whole fit of some epochs in units of the plain step, in units of its own steps where these were timed, the
  highest memory of the fit beyond the network in multiples of the weights, and a prediction of 32 draws.
- **growth**: time and memory of fit and prediction for 10^4 to 10^7 weights, for more and more rows, and for more and
  more draws: the slope of a straight line through the logarithms of the three largest. 1 is linear.

Resident memory is what the Linux kernel counts, as in the memory module. Everything runs in one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Factory, Plan, Step, measure, one_line
from benchmarks.memory import _release, _reset_high_water_mark, _status
from benchmarks.networks import NUM_CLASSES, TRAIN_SIZE, Layers, Network, ResNet18, ViTTiny
from benchmarks.peers import PACKAGES, bayesian_torch, ivon
from benchmarks.step_time import plain_step
from benchmarks.study import Rows, describe, own_process, page, say, table

_TIMEOUT = 900.0
_INPUTS = 64
STEPPED = ("MaximumLikelihood", "MAP", "MeanFieldVI", "NaturalVI")


@dataclass(frozen=True)
class Size:
    """One fit: which network, of about how many weights, by which method, on how many rows, with how many draws."""

    network: str = "mlp"
    method: str = "MAP"
    weights: int = 10_000_000
    rows: int = 640
    batch: int = 32
    draws: int = 32

    def net(self) -> Network:
        """The network."""
        if self.network == "resnet18":
            return Network("ResNet-18 on 3x32x32", ResNet18, (3, 32, 32), self.batch)
        if self.network == "vit_tiny":
            return Network("ViT-tiny on 3x32x32", ViTTiny, (3, 32, 32), self.batch)
        return Network(
            f"MLP of {self.weights:,} weights", lambda layers: mlp_of(self.weights, layers), (_INPUTS,), self.batch
        )


_QUICK = Size(weights=5_000, rows=64, batch=16, draws=4)
_NETWORKS = (Size(), Size("resnet18", rows=160), Size("vit_tiny", rows=160))
_METHODS = ("MAP", "MeanFieldVI", "NaturalVI", "SWAG", "SGLD")
_GROWTH = {
    "weights": [Size(weights=10**n, rows=128, draws=8) for n in (4, 5, 6, 7)],
    "rows": [Size(weights=10**4, rows=rows, draws=8) for rows in (1_000, 10_000, 100_000)],
    "draws": [Size(weights=10**5, rows=256, draws=draws) for draws in (8, 32, 128)],
}
_GROWN = ("MAP", "MeanFieldVI", "SWAG", "Laplace", "SGLD")


def mlp_of(weights: int, layers: Layers) -> nn.Module:
    """64-h-h-10 with ReLU, of about so many weights."""
    half = 0.5 * (_INPUTS + NUM_CLASSES)
    hidden = max(2, round(math.sqrt(weights + half**2) - half))
    return nn.Sequential(
        layers.linear(_INPUTS, hidden), nn.ReLU(), layers.linear(hidden, hidden), nn.ReLU(),
        layers.linear(hidden, NUM_CLASSES),
    )  # fmt: skip


def method_of(size: Size) -> Any:
    """The method with settings of a short fit: two epochs, or as many transitions."""
    import knowable as kn

    trained = {"epochs": 2, "batch_size": size.batch}
    if size.method == "SWAG":
        return kn.SWAG(epochs=1, batch_size=size.batch, snapshots=4, rank=4)
    if size.method == "SGLD":
        return kn.SGLD(chains=1, draws=2, warmup=2, steps=5, step_size=1e-7, batch_size=size.batch, start="network")
    return getattr(kn, size.method)(**trained)


# --- rows ------------------------------------------------------------------------------------------------------------


def steps(size: Size, *, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, and its ratio to the plain one, of every contender."""
    network = size.net()
    contenders: dict[str, Factory] = {"plain": lambda: plain_step(network)}
    contenders |= {name: _own_step(replace(size, method=name)) for name in STEPPED}
    contenders |= {
        "bayesian-torch, reparameterisation": lambda: bayesian_torch(network, "Reparameterization"),
        "ivon-opt": lambda: ivon(network),
    }
    outcomes = measure(contenders, Plan(rounds=rounds, inner=1, warmup=1))
    found: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        taken, ratio = outcome.time(), outcome.ratio(outcomes["plain"])
        found[name] = {"error": outcome.error} if taken is None or ratio is None else {
            "milliseconds": taken.median, "ratio": ratio.median, "lower": ratio.lower, "upper": ratio.upper,
        }  # fmt: skip
    return {"error": found["plain"].get("error"), "contenders": found}


def _own_step(size: Size) -> Factory:
    """A step of a method as its training loop makes it, with all that the loop adds."""

    def build() -> Step:
        import knowable as kn
        from knowable.core.compiling.engine import Engine
        from knowable.core.model.data import as_data
        from knowable.core.training.loop import TrainingRun
        from knowable.core.training.settings import TrainingSettings
        from knowable.inference.point.point import PointObjective

        network = size.net()
        x, y = network.data()
        model = kn.Model(network.make(), kn.Categorical())
        if size.method in ("MaximumLikelihood", "MAP"):
            objective: Any = PointObjective(model, TRAIN_SIZE, use_prior=size.method == "MAP")
        else:
            objective = method_of(size).objective(model, x, TRAIN_SIZE)
        settings = TrainingSettings(epochs=10**6, batch_size=size.batch)
        run = TrainingRun(objective, as_data((x, y), model), settings, None, 0, Engine())
        return lambda: run._one_step([((x, y), len(x))])

    return build


def fit(size: Size, *, rounds: int) -> dict[str, Any]:
    """Seconds and memory of a fit and of a prediction, beside the plain step and the method's own."""
    import knowable as kn

    network = size.net()
    x, y = network.data(size.rows)
    net = network.make()
    weights = sum(value.numel() for value in net.parameters())
    contenders = {"plain": lambda: plain_step(network)}
    if size.method in STEPPED:
        contenders["own"] = _own_step(size)
    times = {name: each.time() for name, each in measure(contenders, Plan(rounds=rounds, inner=1, warmup=1)).items()}
    model = kn.Model(net, kn.Categorical())
    held, (seconds, posterior) = _above(lambda: method_of(size).fit(model, (x, y)))
    forward = _seconds(lambda: net(x[: size.batch]))
    held_then, (predicted, _) = _above(lambda: posterior.predict(x[: size.batch], samples=size.draws))
    plain, own = (None if times.get(name) is None else times[name].median / 1e3 for name in ("plain", "own"))  # type: ignore[union-attr]
    return {
        "weights": weights, "seconds": seconds, "plain": plain, "own": own, "forward": forward, "predict": predicted,
        "memory": held, "copies": held / (4e-6 * weights), "predict_memory": held_then,
        "steps": 2 * (size.rows // size.batch),
    }  # fmt: skip


def _above(action: Callable[[], Any]) -> tuple[float, tuple[float, Any]]:
    """MB of the high-water mark above what is held before, with the seconds and the result."""
    _release()
    before = _status("VmRSS")
    _reset_high_water_mark()
    begun = time.perf_counter()
    found = action()
    seconds = time.perf_counter() - begun
    return max(0.1, _status("VmHWM") - before), (seconds, found)


def _seconds(action: Callable[[], Any]) -> float:
    taken = []
    with torch.no_grad():
        for _ in range(3):
            begun = time.perf_counter()
            action()
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


# --- the study -------------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All rows whose key matches ``only``; each that is finished is kept, and not run again."""
    found: dict[str, dict[str, Any]] = {}
    for kind, size in _wanted(quick):
        key = f"{kind} {json.dumps(asdict(size))}"
        if not fnmatch(f"{kind} {size.network} {size.method}", only):
            continue
        arguments = [kind.partition(" ")[0], json.dumps(asdict(size)), "2" if quick else "5"]
        row = rows.get(key) or rows.add(key, own_process("benchmarks.sizes", arguments, timeout=_TIMEOUT))
        say(f"{kind} {size.network} {size.method} {size.weights:.0e} {size.rows} {size.draws}: {row}")
        found[key] = {"kind": kind, "size": asdict(size), **row}
    return describe("sizes", quick=quick, packages=PACKAGES, rows=list(found.values()), growth=growth(found.values()))


def _wanted(quick: bool) -> Iterable[tuple[str, Size]]:
    networks = (_QUICK,) if quick else _NETWORKS
    for size in networks:
        yield "steps", size
        for method in _METHODS[: 2 if quick else None]:
            if size.network == "mlp" or method != "SGLD":
                yield "fit", replace(size, method=method)
    for what, sizes in _GROWTH.items():
        if quick:
            sizes = [replace(_QUICK, **{what: getattr(_QUICK, what) * factor}) for factor in (1, 4)]
        for method in _GROWN[: 1 if quick else None]:
            for size in sizes:
                if method != "Laplace" or size.weights <= 10**6:  # its eigenvectors: see the note
                    yield f"fit by {what}", replace(size, method=method)


def growth(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Exponents of time and memory by what grows and method: the slope through the three largest."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        if row["kind"].startswith("fit by ") and row.get("error") is None:
            found.setdefault(row["kind"][7:], {}).setdefault(row["size"]["method"], []).append(row)
    figures = ("seconds", "memory", "predict", "predict_memory")
    return {
        what: {
            method: {figure: slope([(_grown(what, row), row[figure]) for row in each]) for figure in figures}
            for method, each in methods.items()
            if len(each) > 1
        }
        for what, methods in found.items()
    }


def _grown(what: str, row: Mapping[str, Any]) -> float:
    return row["weights"] if what == "weights" else row["size"][what]


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Of the least-squares line through the logarithms of the three points with the largest first coordinate."""
    logs = [(math.log(x), math.log(y)) for x, y in sorted(points)[-3:]]
    return statistics.linear_regression(*zip(*logs, strict=True)).slope


def to_markdown(run: Mapping[str, Any]) -> str:
    """The tables."""
    parts = []
    for row in run["rows"]:
        if row["kind"] == "steps":
            title = f"A training step: {Size(**row['size']).net().title}, batch {row['size']['batch']}"
            cells = [_step_cells(name, each) for name, each in row.get("contenders", {}).items()]
            parts.append(table(title, ("contender", "ms", "over plain (quartiles)"), cells, row.get("error") or ""))
    fits = [row for row in run["rows"] if row["kind"] == "fit"]
    header = (
        "network",
        "method",
        "fit, s",
        "in plain steps",
        "over its own steps",
        "memory, in weights",
        "32 draws, in forward passes",
    )
    parts.append(table("Whole fits", header, map(_fit_cells, fits), _FIT_NOTE))
    for what, methods in run["growth"].items():
        cells = [[method, *(f"{value:.2f}" for value in each.values())] for method, each in methods.items()]
        header = ("method", "fit time", "fit memory", "prediction time", "prediction memory")
        parts.append(table(f"Growth with {what}: exponents", header, cells, _GROWTH_NOTE))
    return page(run, *parts)


_FIT_NOTE = (
    "Memory is the highest of the fit beyond the network itself. A prediction is of one batch. SWAG makes its steps, "
    "those of the mode, and looks for its rate; SGLD makes 20 steps."
)
_GROWTH_NOTE = (
    "1 is linear. Time below some milliseconds and memory below some MB do not grow yet. Laplace has Kronecker factors "
    "here, up to 10^6 weights: the eigenvectors of a layer of h x h weights take h³ operations, P^1.5."
)


def _step_cells(name: str, each: Mapping[str, Any]) -> list[str]:
    if "error" in each:
        return [name, "-", each["error"] or ""]
    return [name, f"{each['milliseconds']:.0f}", f"{each['ratio']:.2f} ({each['lower']:.2f} to {each['upper']:.2f})"]


def _fit_cells(row: Mapping[str, Any]) -> list[str]:
    names = [row["size"]["network"], row["size"]["method"]]
    if row.get("error") is not None:
        return [*names, row["error"]]
    own = "" if row["own"] is None else f"{row['seconds'] / (row['steps'] * row['own']):.2f}"
    return [
        *names, f"{row['seconds']:.1f}", f"{row['seconds'] / row['plain']:.0f} ({row['steps']} steps)", own,
        f"{row['copies']:.1f}", f"{row['predict'] / row['forward']:.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="One row, as a line of JSON.")
    parser.add_argument("kind", choices=("steps", "fit"))
    parser.add_argument("size", type=json.loads)
    parser.add_argument("rounds", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)  # on a busy machine several only wait for each other
    warnings.simplefilter("ignore")  # of fits that are too short
    try:
        made = {"steps": steps, "fit": fit}[given.kind](Size(**given.size), rounds=given.rounds)
        print(json.dumps({"error": None, **made}))
    except Exception as error:
        print(json.dumps({"error": one_line(error)}))


if __name__ == "__main__":
    main()
