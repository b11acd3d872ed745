"""A benchmark of known outcome, for testing the harness."""

from __future__ import annotations

import importlib
import time

import torch
from benchmarks.harness import Case, Plan, Step

MEGABYTE = 250_000  # float32 values


def cases(*, quick: bool) -> list[Case]:
    return [
        Case(
            name="tiny",
            title="Tiny contenders" + " (quick)" * quick,
            contenders={
                "short": lambda: sleeper(0.001),
                "long": lambda: sleeper(0.004),
                "absent": lambda: importlib.import_module("no_such_package_anywhere").step,
                "broken": broken,
                "hungry": hungry,
            },
            reference="short",
            plan=Plan(rounds=3, inner=2, warmup=1),
            packages=("numpy", "no-such-package-anywhere"),
            note="A note.",
        )
    ]


def sleeper(seconds: float) -> Step:
    return lambda: time.sleep(seconds)


def broken() -> Step:
    raise ValueError("a first | line\nand a second")


def hungry() -> Step:
    """Holds 60 MB once built, and 120 MB within a step."""
    held = torch.ones(60 * MEGABYTE)
    return lambda: (held + 1.0)[0]
