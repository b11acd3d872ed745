"""Results as data (JSON) and as tables (Markdown) made from the same data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.environment import Environment
from benchmarks.harness import Case, Outcome, Plan, Spread

_HEADER = ("contender", "ratio", "ratio, quartiles", "median ms", "quartiles ms", "min ms", "built MB", "peak MB")


def describe_case(case: Case, plan: Plan, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """One case as plain values."""
    reference = outcomes[case.reference]
    return {
        "name": case.name,
        "title": case.title,
        "reference": case.reference,
        "plan": asdict(plan),
        "note": case.note,
        "contenders": {name: _describe_outcome(outcome, reference) for name, outcome in outcomes.items()},
    }


def describe_run(
    benchmark: str, cases: list[dict[str, Any]], environment: Environment, *, quick: bool
) -> dict[str, Any]:
    """A whole benchmark as plain values."""
    return {"benchmark": benchmark, "quick": quick, "environment": environment.to_dict(), "cases": cases}


def to_markdown(run: Mapping[str, Any]) -> str:
    """The tables of a described run."""
    warning = "**Quick run: shows that everything works, its figures mean nothing.**\n\n" if run["quick"] else ""
    tables = "\n".join(_table(case) for case in run["cases"])
    return f"# {run['benchmark']}\n\n{warning}{tables}\n{_environment(run['environment'])}"


def write(run: Mapping[str, Any], folder: Path) -> tuple[Path, Path]:
    """Write ``<benchmark>.json`` and ``<benchmark>.md``, each whole or not at all; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{run['benchmark']}.json", folder / f"{run['benchmark']}.md"
    _write_atomically(data, json.dumps(run, indent=1) + "\n")
    _write_atomically(page, to_markdown(run))
    return data, page


def with_earlier_cases(run: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A run of some cases, and those that an earlier run has left in ``folder``, which keep their date."""
    file = folder / f"{run['benchmark']}.json"
    if not file.exists():
        return dict(run)
    earlier = json.loads(file.read_text(encoding="utf-8"))
    if earlier["quick"] != run["quick"]:
        return dict(run)
    new = {case["name"] for case in run["cases"]}
    date = earlier["environment"]["date"]
    kept = [{"measured": date, **case} for case in earlier["cases"] if case["name"] not in new]
    return {**run, "cases": [*kept, *run["cases"]]}


def _describe_outcome(outcome: Outcome, reference: Outcome) -> dict[str, Any]:
    time, ratio = outcome.time(), outcome.ratio(reference)
    return {
        "error": outcome.error,
        "time": None if time is None else asdict(time),
        "ratio": None if ratio is None else asdict(ratio),
        "memory": None if outcome.memory is None else dict(outcome.memory),
        "milliseconds": [round(value, 5) for value in outcome.milliseconds],
    }


def _table(case: Mapping[str, Any]) -> str:
    contenders = case["contenders"]
    with_memory = any(each["memory"] for each in contenders.values())
    header = _HEADER if with_memory else _HEADER[:-2]
    rows = [_row(name, each, len(header)) for name, each in contenders.items()]
    plan = case["plan"]
    caption = (
        f"Ratio to *{case['reference']}*; {plan['rounds']} rounds of {plan['inner']} steps. {case['note']}".strip()
    )
    if "measured" in case:
        caption += f" Measured {case['measured']}."
    lines = [f"## {case['title']}", "", _cells(header), _cells(["---"] * len(header)), *rows, "", caption, ""]
    return "\n".join(lines)


def _row(name: str, contender: Mapping[str, Any], width: int) -> str:
    if contender["error"] is not None:
        return _cells([name, f"failed: {contender['error']}", *[""] * (width - 2)])
    time = Spread(**contender["time"])
    ratio = Spread(**contender["ratio"]) if contender["ratio"] else None
    cells = [
        name,
        f"{ratio.median:.2f}" if ratio else "",
        f"{ratio.lower:.2f}–{ratio.upper:.2f}" if ratio else "",
        _digits(time.median),
        f"{_digits(time.lower)}–{_digits(time.upper)}",
        _digits(time.minimum),
    ]
    return _cells([*cells, *_memory_cells(contender["memory"])][:width] + [""] * (width - 8))


def _digits(value: float) -> str:
    """Three significant digits, without exponents from 1,000 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _memory_cells(memory: Mapping[str, Any] | None) -> list[str]:
    if memory is None:
        return ["", ""]
    if "error" in memory:
        return ["", f"failed: {memory['error']}"]
    return [f"{memory['built']:.0f}", f"{memory['peak']:.0f}"]


def _cells(values: Any) -> str:
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"


def _environment(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return (
        f"{environment['date']}; {environment['cpu']}, {environment['cores']} cores, {environment['threads']} threads, "
        f"load {environment['load']}; {environment['system']}, Python {environment['python']}.\n\n{versions}.\n"
    )


def _write_atomically(path: Path, text: str) -> None:
    """Write beside the target and rename: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
