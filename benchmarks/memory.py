"""Peak memory of one contender, measured alone in a fresh process.

What is measured is resident memory as the Linux kernel counts it. The process first builds the contender, makes one
step and throws it away, so that everything is imported and every library has started; the memory it then holds is the
baseline. Then the kernel's high-water mark is reset, the contender is built again, and makes a few steps:

- ``built``: memory held after building, above the baseline (parameters, data, kept draws);
- ``peak``: the high-water mark of building and stepping, above the baseline.

Both are in MB (10^6 bytes), good to a few MB: what the allocator gives back to the system before the baseline varies.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.harness import Factory, one_line

_STEPS = 3
_TIMEOUT = 600.0


def peak_memory(module: str, case: str, contender: str, *, quick: bool = False) -> Mapping[str, float | str]:
    """Measure one contender of a benchmark module in a process of its own.

    Args:
        module: Name of the module whose ``cases(quick)`` lists the case.
        case: Name of the case.
        contender: Name of the contender.
        quick: Which variant of the case to build.

    Returns:
        ``{"built": MB, "peak": MB}``, or ``{"error": why not}``.
    """
    command = [sys.executable, "-m", "benchmarks.memory", module, case, contender]
    command += ["--threads", str(torch.get_num_threads())] + ["--quick"] * quick
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, env=environment, cwd=root, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {_TIMEOUT:.0f} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": f"the process ended with code {done.returncode}"}


def measure_here(factory: Factory, *, steps: int = _STEPS) -> dict[str, float]:
    """Measure in this process; the figures mean what the module says only if nothing else was run before."""
    factory()()
    _release()
    baseline = _status("VmRSS")
    _reset_high_water_mark()
    step = factory()
    built = _status("VmRSS")
    for _ in range(steps):
        step()
    return {"built": round(built - baseline, 1), "peak": round(_status("VmHWM") - baseline, 1)}


def peak_of(work: Callable[[], object]) -> float:
    """The high-water mark of a function in this process, in MB above what was held before."""
    _release()
    baseline = _status("VmRSS")
    _reset_high_water_mark()
    work()
    return round(_status("VmHWM") - baseline, 1)


def _release() -> None:
    """Give freed memory back to the system, as far as the C library can."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library: a little less precise


def _reset_high_water_mark() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> float:
    """A field of /proc/self/status in MB."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise OSError(f"the kernel does not report {key}")
    return int(found.group(1)) * 1024 / 1e6


def _find(module: str, case: str, contender: str, quick: bool) -> Factory:
    cases = {each.name: each for each in importlib.import_module(module).cases(quick=quick)}
    return cases[case].contenders[contender]


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one contender, as a line of JSON.")
    parser.add_argument("module")
    parser.add_argument("case")
    parser.add_argument("contender")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        factory = _find(arguments.module, arguments.case, arguments.contender, arguments.quick)
        print(json.dumps(measure_here(factory)))
    except Exception as error:
        print(json.dumps({"error": one_line(error)}))


if __name__ == "__main__":
    main()
