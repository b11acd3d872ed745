"""Options that several commands share, and ``--config``: a TOML or JSON file in place of flags.

``seed = 3`` in the file is ``--seed 3``; a flag on the command line goes before the file. The ``config.json`` of a run
is such a file: ``knowable fit --config run/config.json --out again`` repeats the run.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from knowable.errors import InvalidArgument
from knowable.interfaces.cli.messages import plain_errors

MADE = "made"
"""The key under which a run's configuration says how it was made; it is no option."""


@dataclass(frozen=True)
class Option:
    """An option or argument of a command."""

    name: str  # what the command calls it inside
    key: str  # what a file calls it: its long flag without the dashes
    many: bool = False


def use_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: its file's values become the defaults of the other options."""
    if path is None or context.resilient_parsing:
        return path
    with plain_errors():
        context.default_map = {**(context.default_map or {}), **read_options(path, options_of(context))}
    return path


def options_of(context: typer.Context) -> list[Option]:
    """What a file may set for the command."""
    found = []
    for parameter in context.command.params:
        name = str(parameter.name)
        long = next((flag for flag in parameter.opts if flag.startswith("--")), name)
        found.append(Option(name, _key(long.lstrip("-")), bool(parameter.multiple)))
    return [option for option in found if option.name not in ("config", "help")]


def read_options(path: Path, options: Iterable[Option]) -> dict[str, Any]:
    """Values of options from a file, under the names that the command has for them.

    Raises:
        InvalidArgument: If the file cannot be read, or names an option that does not exist.
    """
    known = {option.key: option for option in options}
    found = {}
    for key, value in _load(path).items():
        if key == MADE or value is None:
            continue
        option = known.get(_key(key))
        if option is None:
            near = difflib.get_close_matches(_key(key), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"The options are {', '.join(sorted(known))}."
            raise InvalidArgument(f"{path} sets {key!r}, which is no option of this command. {hint}")
        found[option.name] = _as_flag(path, key, value, many=option.many)
    return found


def _key(name: str) -> str:
    return name.replace("-", "_")


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not text in UTF-8. Save it so.") from None
    except OSError as error:
        raise InvalidArgument(f"--config {path} cannot be read: {error.strerror}. Check its name.") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise InvalidArgument(f"{path} is not {kind}: {error}. Correct it there.") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} must hold names of options with their values, got a {type(content).__name__}.")
    return content


def _as_flag(path: Path, key: str, value: Any, *, many: bool) -> Any:
    """A value as the command line would give it: a table of names becomes ``name=value`` texts."""
    if isinstance(value, dict):
        value = [f"{name}={each}" for name, each in value.items()]
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        raise InvalidArgument(f"{path}: {key!r} must be a value or a list of values.")
    if isinstance(value, list) and not many:
        raise InvalidArgument(f"{path}: {key!r} takes one value, got {len(value)}.")
    return [value] if many and not isinstance(value, list) else value


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


DataFile = Annotated[
    str, typer.Argument(metavar="DATA", help="CSV, CSV.GZ, Excel or Parquet file; - reads standard input.")
]
RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder, or file.knowable, that knowable fit has written.")
]
Target = Annotated[
    str | None, typer.Option("--target", "-t", metavar="COLUMN", help="The column to predict (the target). Required.")
]
Task = Annotated[
    str,
    typer.Option(
        metavar="auto|regression|classification", help="Whether the target is a number or a class; auto infers it."
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
Budget = Annotated[
    str, typer.Option(metavar="quick|normal|thorough", help="How much work auto puts into the fit, on any machine.")
]
Likelihood = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, or how the target varies: gaussian, heteroscedastic_gaussian, student_t, "
        "heteroscedastic_student_t, log_normal, logit_normal, poisson, negative_binomial, zero_inflated; "
        "categorical, bernoulli.",
    ),
]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", metavar="SECONDS", help="Most time for the fit, which it may cut short.")
]
EngineName = Annotated[
    str | None,
    typer.Option("--engine", metavar="NAME", help="ray: independent fits run there (RAY_ADDRESS, or here)."),
]
Identifier = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="COLUMN", help="A column that names the rows: no input; may be repeated."),
]
Missing = Annotated[
    list[str] | None,
    typer.Option("--missing", metavar="VALUE", help="A value that stands for a missing one, as -999; may be repeated."),
]
Group = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="Hold out whole groups: rows with the same value here stay together."),
]
Time = Annotated[str | None, typer.Option(metavar="COLUMN", help="Hold out the latest rows by this column.")]
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
        help="TOML or JSON file with names of options as keys; flags on the command line win.",
        is_eager=True,
        callback=use_config,
    ),
]
Level = Annotated[float, typer.Option(metavar="SHARE", help="Nominal coverage of the intervals, as 0.9.")]


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
