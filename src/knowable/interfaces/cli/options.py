"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from knowable.errors import InvalidArgument
from knowable.interfaces.cli.config_file import use_config


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Names of methods that begin so, with what they do."""
    from knowable.registry import METHODS

    found = [("auto", "chosen by the size of the data and the budget")]
    found += [(entry.name, entry.summary) for entry in METHODS.values()]
    return [(name, text) for name, text in found if name.startswith(incomplete.lower())]


def complete_methods(incomplete: str) -> list[str]:
    """The same behind a comma: ``mfvi,la`` becomes ``mfvi,laplace``."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name, _ in complete_method(last) if name != "auto"]


DataFile = Annotated[str, typer.Argument(metavar="DATA", help="CSV or Parquet file; - reads standard input.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that knowable fit has written.")]
Target = Annotated[str, typer.Option("--target", "-t", metavar="COLUMN", help="The column to predict.")]
Task = Annotated[
    str,
    typer.Option(
        metavar="auto|regression|classification",
        help="Whether the target is a number or a class; auto looks at it.",
    ),
]
Drop = Annotated[
    list[str] | None, typer.Option("--drop", metavar="COLUMN", help="A column not to use; may be repeated.")
]
Kind = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        metavar="COLUMN=KIND",
        help="numeric, categorical, boolean, date, or levels as small<large, if the guess is wrong; may be repeated.",
    ),
]
Budget = Annotated[float | None, typer.Option(metavar="SECONDS", help="Time the fit may take.")]
Seed = Annotated[int, typer.Option(metavar="N", help="Fixes every random choice.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what an earlier command has written.")]
Lenient = Annotated[bool, typer.Option("--lenient", help="Go on with data that looks wrong; it becomes a warning.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML or JSON file with names of options as keys; flags go before it.",
        is_eager=True,
        callback=use_config,
    ),
]
Level = Annotated[float, typer.Option(metavar="SHARE", help="How much of the outcomes an interval should hold.")]


def parse_kinds(given: list[str] | None) -> dict[str, Any]:
    """``["zip=categorical", "size=small<large"]`` as a mapping; what has an order becomes a list of levels."""
    found: dict[str, Any] = {}
    for text in given or []:
        name, equals, kind = (part.strip() for part in text.rpartition("="))
        if not equals or not name:
            raise InvalidArgument(f"--kind takes COLUMN=KIND, as in --kind zip=categorical; got {text!r}.")
        levels = [level.strip() for level in kind.split("<")]
        found[name] = levels if len(levels) > 1 else kind.strip().lower()
    return found


def parse_task(task: str) -> str | None:
    """The task, or None to look at the target."""
    task = task.strip().lower()
    if task not in ("auto", "regression", "classification"):
        raise InvalidArgument(f"--task must be auto, regression or classification, got {task!r}.")
    return None if task == "auto" else task
