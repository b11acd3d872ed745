"""What the longer benchmarks share: rows that survive a stop, processes of their own, and tables.

A study is a module of this package with two functions:

- ``run(*, quick, only, rows) -> dict``: works through its rows, keeps each in ``rows`` as soon as it is known, skips
  those that are already there, and returns everything as plain values;
- ``to_markdown(run) -> str``: the tables of that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import Environment
from benchmarks.report import _cells, _environment, _write_atomically

THREADS = 2
"""Threads of every contender that runs in a process of its own."""


class Rows:
    """Finished rows by key, in a file that grows by whole lines, or in memory only.

    A run that is stopped finds its rows again; the last line of a run that was killed while writing is dropped.

    Args:
        path: The file, or None to keep nothing.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._rows: dict[str, dict[str, Any]] = {}
        if path is None or not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines()
        for line in lines:
            try:
                key, row = json.loads(line)
            except ValueError:
                continue
            self._rows[key] = row
        if len(self._rows) < len(lines):
            _write_atomically(path, "".join(_line(key, row) for key, row in self._rows.items()))

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: str) -> dict[str, Any] | None:
        """The row of that key, if it is there."""
        return self._rows.get(key)

    def add(self, key: str, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row: one write of one line, on the disk before this returns.

        What failed is tried again next time, but for what ran out of time.
        """
        self._rows[key] = row
        if self.path is not None and (row.get("error") is None or row.get("ran_out")):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, _line(key, row).encode())
                os.fsync(file)
            finally:
                os.close(file)
        return row

    def forget(self) -> None:
        """Remove the file: the run is complete, and the next one begins anew."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def say(text: str) -> None:
    """Progress, beside the tables."""
    print(text, file=sys.stderr, flush=True)


def own_process(module: str, arguments: Sequence[str], *, timeout: float) -> dict[str, Any]:
    """Run ``python -m module arguments`` alone, with :data:`THREADS` threads and an empty compiler cache.

    Returns:
        What its last line of output says, as JSON, or ``{"error": why not}``.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as cache:
        command = [sys.executable, "-m", module, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, env=child_environment(cache), check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {timeout:.0f} s", "ran_out": True}
    return last_line(done.stdout, done.returncode, done.stderr)


def last_line(output: str, code: int, errors: str = "") -> dict[str, Any]:
    """The last line of a process's output as JSON, or why there is none."""
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        reason = (errors.strip().splitlines() or [""])[-1]
        return {"error": f"the process ended with code {code}: {reason}"[:200].rstrip(": ")}


def child_environment(cache: str) -> dict[str, str]:
    """The variables of a process with :data:`THREADS` threads that compiles from scratch."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(THREADS))
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *(path for path in sys.path if path)])
    return {**os.environ, **threads, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": cache, "JAX_PLATFORMS": "cpu"}


def describe(benchmark: str, *, quick: bool, packages: Iterable[str], **content: Any) -> dict[str, Any]:
    """A whole study as plain values, with the machine and the software."""
    environment = Environment.now(packages).to_dict()
    return {"benchmark": benchmark, "quick": quick, "environment": environment, **content}


def page(run: Mapping[str, Any], *parts: str) -> str:
    """A page of tables and text, with the environment below."""
    warning = "**Quick run: shows that everything works, its figures mean nothing.**\n\n" if run["quick"] else ""
    return f"# {run['benchmark']}\n\n{warning}" + "\n".join([*parts, _environment(run["environment"])])


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]], note: str = "") -> str:
    """A table in Markdown below its title; rows are filled up to the header's width."""
    cells = [_cells([*row, *[""] * (len(header) - len(row))]) for row in rows]
    return "\n".join([f"## {title}", "", _cells(header), _cells(["---"] * len(header)), *cells, "", note, ""])


def write_study(run: Mapping[str, Any], text: str, folder: Path) -> tuple[Path, Path]:
    """Write ``<benchmark>.json`` and ``<benchmark>.md``, each whole or not at all; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, sheet = folder / f"{run['benchmark']}.json", folder / f"{run['benchmark']}.md"
    _write_atomically(data, json.dumps(run, indent=1) + "\n")
    _write_atomically(sheet, text)
    return data, sheet


def _line(key: str, row: Mapping[str, Any]) -> str:
    return json.dumps([key, row]) + "\n"
