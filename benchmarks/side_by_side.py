"""Two checkouts of knowable side by side: ``python -m benchmarks.side_by_side OLD NEW [benchmark ...]``.

Each checkout runs in a process of its own that builds our contenders of a case and then waits; a turn of one is
followed at once by the same turn of the other, so that a busy machine slows both alike. What is printed is the new
time over the old one: the median over the rounds, and the quartiles. Peers are left out.

    python -m benchmarks.side_by_side ../before . step_time prediction --rounds 20 --memory
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

BENCHMARKS = ("step_time", "prediction", "gradients", "ensembles", "laplace", "effective_samples")

_CHAINS = {"HMC": (16, 100, 200), "NUTS": (16, 60, 40), "MCLMC": (16, 100, 200)}  # chains, warm-up, draws


def factories(name: str, *, quick: bool) -> dict[str, tuple[Callable[[], Callable[[], object]], int]]:
    """Our contenders of a benchmark: what builds each, and how many steps a turn has."""
    if name == "effective_samples":
        return {f"diabetes: {method}": (_chain_run(method), 1) for method in _CHAINS}
    module = importlib.import_module(f"benchmarks.{name}")
    return {
        f"{case.name}: {contender}": (factory, 1 if quick else case.plan.inner)
        for case in module.cases(quick=quick)
        for contender, factory in case.contenders.items()
        if contender.startswith("knowable")
    }


def _chain_run(method: str) -> Callable[[], Callable[[], object]]:
    from benchmarks.effective_samples_peers import SAMPLERS, Settings
    from benchmarks.targets import TARGETS

    chains, warmup, draws = _CHAINS[method]

    def build() -> Callable[[], object]:
        target = TARGETS["diabetes"]()
        settings = Settings(chains, warmup, draws)
        return lambda: SAMPLERS["knowable"](target, settings, 0, method=method, mode="traced", start="prior").seconds

    return build


def serve() -> None:
    """Answer turns on standard input: the name of a contender in, milliseconds of a step out."""
    import torch

    from benchmarks.harness import _time_of_step, _warmed_up, one_line
    from benchmarks.memory import measure_here

    torch.set_num_threads(1)
    known: dict[str, tuple[Any, int]] = {}
    steps: dict[str, Any] = {}
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        kind, name, quick = json.loads(line)
        try:
            if kind == "list":
                known = factories(name, quick=quick)
                answer: Any = list(known)
                steps.clear()
            elif kind == "memory":
                known = factories(name.split("|")[0], quick=quick)
                answer = measure_here(known[name.split("|")[1]][0])
            else:
                if name not in steps:
                    steps[name] = _warmed_up(known[name][0], 2 if known[name][1] > 1 else 1)
                answer = _time_of_step(steps[name], known[name][1])
        except Exception as error:
            answer = {"error": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


class Checkout:
    """A process that serves the turns of one checkout."""

    def __init__(self, folder: Path):
        environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"}
        here = Path(__file__).resolve()
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import runpy; runpy.run_path({str(here)!r}, run_name='serve')['serve']()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder,
            env=environment,
        )  # fmt: skip

    def ask(self, kind: str, name: str, quick: bool) -> Any:
        """One answer."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([kind, name, quick]), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


def compare(old: Path, new: Path, name: str, *, rounds: int, quick: bool, only: str) -> Iterator[tuple[str, Any]]:
    """Every contender of a benchmark with the spread of new over old, or what failed."""
    from benchmarks.harness import Spread

    pair = Checkout(old), Checkout(new)
    names = [each.ask("list", name, quick) for each in pair]
    if not isinstance(names[0], list) or not isinstance(names[1], list):
        yield name, [each["error"] for each in names if not isinstance(each, list)]
        return
    for contender in [each for each in names[0] if each in names[1] and fnmatch(each, only)]:
        found: list[float] = []
        failed = ""
        for number in range(rounds):
            order = pair if number % 2 else pair[::-1]
            times = {each: each.ask("turn", contender, quick) for each in order}
            if any(isinstance(each, dict) for each in times.values()):
                failed = "; ".join(str(each) for each in times.values() if isinstance(each, dict))
                break
            found.append(times[pair[1]] / times[pair[0]])
        yield contender, failed or Spread.of(found)
    for each in pair:
        each.close()


def memory(folder: Path, name: str, contender: str, quick: bool) -> dict[str, float]:
    """Peak memory of one contender, in a process of its own."""
    checkout = Checkout(folder)
    try:
        return checkout.ask("memory", f"{name}|{contender}", quick)
    finally:
        checkout.close()


def main() -> None:
    """Parse, run and print."""
    parser = argparse.ArgumentParser(description="Two checkouts of knowable side by side.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("names", nargs="*", default=BENCHMARKS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", default="*", help="glob of contenders")
    parser.add_argument("--quick", action="store_true", help="the small problems of each benchmark")
    parser.add_argument("--memory", action="store_true", help="peak memory too")
    given = parser.parse_args()
    print("| benchmark | contender | new / old | quartiles |" + " peak MB old | new |" * given.memory)
    print("|---|---|---|---|" + "---|---|" * given.memory, flush=True)
    old, new = given.old.resolve(), given.new.resolve()
    for name in given.names:
        for contender, spread in compare(old, new, name, rounds=given.rounds, quick=given.quick, only=given.only):
            if isinstance(spread, str | list):
                print(f"| {name} | {contender} | failed: {spread} | |", flush=True)
                continue
            row = f"| {name} | {contender} | {spread.median:.3f} | {spread.lower:.3f}–{spread.upper:.3f} |"
            if given.memory:
                peaks = [memory(each, name, contender, given.quick).get("peak", "failed") for each in (old, new)]
                row += f" {peaks[0]} | {peaks[1]} |"
            print(row, flush=True)


if __name__ == "__main__":
    main()
