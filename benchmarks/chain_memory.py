"""Sixteen chains of a 784-100-10 network on 2,000 images: the memory of a whole run, and whether it survives a kill.

Three processes run the same fit: one undisturbed, one that is killed (SIGKILL) in the middle of its chains, and one
that goes on from the checkpoint the killed one left. Of each the highest resident memory is taken, everything included:
Python, torch, data, training of the start, draws, checkpoints and a prediction. The draws of the first and the last
must be the same bits.

There are as many draws as the default budget for draws (1 GB) holds, which is the most memory a run can need.
Trajectories have one step: what is measured does not depend on their length. MNIST is used where ``KNOWABLE_DATA``
names a folder with ``mnist.npz``, otherwise noise of the same shape.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study import Rows, child_environment, describe, last_line, page, say, table

LIMIT = 2 * 2**30
_TIMEOUT = 300.0
_HEADER = ("run", "peak MiB", "seconds", "draws", "sha256 of the draws")


@dataclass(frozen=True)
class Size:
    """How large a run is, how often it saves, and where its chains begin."""

    chains: int = 16
    rows: int = 2000
    hidden: int = 100
    inputs: int = 784
    warmup: int = 10
    draws: int = 190
    save_seconds: float = 2.0
    start: str = "ensemble"


FULL = Size()
_QUICK = Size(chains=2, rows=20, hidden=3, inputs=9, warmup=50, draws=200, save_seconds=0.0, start="prior")


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """The three processes; what is finished is not run again, except that a kill and its resumption are one."""
    size = _QUICK if quick else FULL
    key = json.dumps(asdict(size))
    whole = rows.get(f"undisturbed {key}") or rows.add(f"undisturbed {key}", undisturbed(size))
    say(f"undisturbed: {whole}")
    pair = rows.get(f"resumed {key}") or rows.add(f"resumed {key}", killed_and_resumed(size))
    say(f"killed: {pair['killed']}\nresumed: {pair['resumed']}")
    runs = {"undisturbed": whole, "killed": pair["killed"], "resumed": pair["resumed"]}
    return describe("chain_memory", quick=quick, packages=(), size=asdict(size), runs=runs, **verdict(runs))


def verdict(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Whether all stayed within the limit and the draws are the same; None where a run failed."""
    failed = [f"{name}: {each['error']}" for name, each in runs.items() if "error" in each]
    if failed:
        return {"error": failed[0], "within_limit": None, "same_draws": None}
    within = all(each["peak"] <= LIMIT for each in runs.values())
    return {
        "error": None,
        "within_limit": within,
        "same_draws": runs["undisturbed"]["digest"] == runs["resumed"]["digest"],
    }


def undisturbed(size: Size) -> dict[str, Any]:
    """A run from beginning to end, checkpoints included."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        return _wait(_process(size, Path(folder)))


def killed_and_resumed(size: Size) -> dict[str, Any]:
    """A run that is killed between two checkpoints of its chains, and the run that takes it up."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        first = _process(size, Path(folder))
        killed = _kill_in_the_middle(
            first, Path(folder) / "checkpoint" / "chains" / "manifest.json", size.save_seconds / 2
        )
        if "error" in killed:
            return {"error": killed["error"], "killed": killed, "resumed": {"error": "nothing to resume"}}
        resumed = _wait(_process(size, Path(folder)))
        return {"error": resumed.get("error"), "killed": killed, "resumed": resumed}


def _process(size: Size, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.chain_memory", json.dumps(asdict(size)), str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment(str(folder / "cache"))
    )


def _wait(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"took more than {_TIMEOUT:.0f} s"}
    return last_line(output, process.returncode, errors)


def _kill_in_the_middle(process: subprocess.Popen[str], saved: Path, delay: float) -> dict[str, Any]:
    """Kill the process ``delay`` seconds after the second checkpoint of its chains; what it had used by then."""
    begun, peak = time.monotonic(), 0
    seen: set[tuple[int, int]] = set()
    while len(seen) < 2:
        if process.poll() is not None or time.monotonic() - begun > _TIMEOUT:
            process.kill()
            output, errors = process.communicate()
            return {"error": "ended before it could be killed", **last_line(output, process.returncode, errors)}
        seen |= _version(saved)
        peak = max(peak, peak_memory(process.pid))
        time.sleep(0.01)
    time.sleep(delay)
    peak = max(peak, peak_memory(process.pid))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    if process.returncode != -signal.SIGKILL:
        return {"error": "ended before it could be killed"}
    return {"peak": peak, "seconds": time.monotonic() - begun}


def _version(file: Path) -> set[tuple[int, int]]:
    """What tells a file from the one that replaces it; nothing while there is none."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return set()
    return {(found.st_ino, found.st_mtime_ns)}


def peak_memory(process: int | str = "self") -> int:
    """Highest resident memory of a process in bytes, as the Linux kernel counts it; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


# --- the process that is measured ------------------------------------------------------------------------------------


def images(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Images as rows of numbers from 0 to 1, and their labels."""
    folder = os.environ.get("KNOWABLE_DATA")
    if folder and size.inputs == 784 and (Path(folder) / "mnist.npz").exists():
        with np.load(Path(folder) / "mnist.npz") as file:
            x, y = file["x_train"][: size.rows], file["y_train"][: size.rows]
        return x.reshape(len(x), -1).astype(np.float32) / 255, y.astype(np.int64)
    generator = np.random.default_rng(0)
    return generator.random((size.rows, size.inputs), dtype=np.float32), generator.integers(0, 10, size.rows)


def fit(size: Size, folder: Path) -> dict[str, Any]:
    """Fit, predict, and say what it took."""
    import torch
    from torch import nn

    import knowable as kn
    from knowable.inference.sampling import HMC

    x, y = (torch.from_numpy(each) for each in images(size))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(size.inputs, size.hidden), nn.ReLU(), nn.Linear(size.hidden, 10))
    sampler = HMC(chains=size.chains, warmup=size.warmup, draws=size.draws, start=size.start, steps=1)
    begun = time.perf_counter()
    posterior = sampler.fit(
        kn.Model(net, kn.Categorical(), kn.Normal(1.0)), (x, y), seed=0, progress=False,
        checkpoint=kn.Checkpoint(folder / "checkpoint", seconds=size.save_seconds),
    )  # fmt: skip
    seconds = time.perf_counter() - begun
    posterior.predict(x[:1000])
    digest = hashlib.sha256()
    for value in posterior.draws.values():
        for chain in value:
            digest.update(chain.contiguous().numpy())
    draws = next(iter(posterior.draws.values())).shape[1]
    return {"peak": peak_memory(), "seconds": seconds, "draws": draws, "digest": digest.hexdigest()[:16]}


def main() -> None:
    parser = argparse.ArgumentParser(description="One fit, as a line of JSON.")
    parser.add_argument("size", type=json.loads)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # such chains have not mixed, and are not meant to
    try:
        print(json.dumps(fit(Size(**given.size), given.folder)))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:200]}))


# --- the table -------------------------------------------------------------------------------------------------------


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table and what it says."""
    size = Size(**run["size"])
    title = f"{size.chains} chains of {size.inputs}-{size.hidden}-10 on {size.rows:,} images"
    return page(
        run, table(title, _HEADER, [_cells(name, each) for name, each in run["runs"].items()], _conclusion(run))
    )


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [name, f"failed: {row['error']}"]
    return [
        name,
        f"{row['peak'] / 2**20:,.0f}",
        f"{row['seconds']:.0f}",
        str(row.get("draws", "")),
        row.get("digest", ""),
    ]


def _conclusion(run: Mapping[str, Any]) -> str:
    if run["error"]:
        return f"Failed: {run['error']}."
    within = "All runs stayed within" if run["within_limit"] else "Not all runs stayed within"
    same = "the same draws" if run["same_draws"] else "OTHER draws"
    return f"{within} {LIMIT / 2**30:g} GiB; the resumed run ended with {same}."


if __name__ == "__main__":
    main()
