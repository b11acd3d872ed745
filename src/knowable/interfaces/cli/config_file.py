"""A file in place of flags: TOML or JSON, with the names of the options as keys.

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
from typing import Any

import typer

from knowable.errors import InvalidArgument
from knowable.interfaces.cli.exits import plain_errors

MADE = "made"
"""The key under which a run's configuration says how it was made; it is no option."""


@dataclass(frozen=True)
class Option:
    """An option or argument of a command.

    Attributes:
        name: What the command calls it inside.
        key: What a file calls it: its long flag without the dashes.
        many: Whether it may be repeated.
    """

    name: str
    key: str
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

    Args:
        path: The file; ``.json`` is read as JSON, everything else as TOML.
        options: The options there are.

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
