"""Runs are folders: written whole or not at all, and nothing is overwritten unasked.

- ``config.json``: the options of the command, and under ``made`` how the run was made;
- ``schema.json``: what the columns are, as learned from the training rows;
- ``estimator.json`` and ``posterior/``: the fitted estimator, numbers and text, never code;
- ``history.csv``: the records of the training; only a header where there are none;
- ``scores.json``: scores on the held-out rows with standard errors;
- ``report.json`` and ``report.html``: the report as data, and for people (where matplotlib and jinja2 are
  installed).
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowable.core.support.files import check_folder, write_atomically
from knowable.errors import DamagedArtifact, InvalidArgument
from knowable.interfaces.cli.options import MADE
from knowable.report.html import finite

CONFIG, SCHEMA, POSTERIOR = "config.json", "schema.json", "posterior"
HISTORY, SCORES, REPORT_DATA, REPORT = "history.csv", "scores.json", "report.json", "report.html"


@dataclass(frozen=True)
class RunFolder:
    """A run on disk."""

    folder: Path
    options: Mapping[str, Any]
    made: Mapping[str, Any]  # how it was made: versions, the data's name and hash, the method chosen

    @classmethod
    def open(cls, folder: Path) -> RunFolder:
        """Read what a run says about itself.

        Raises:
            InvalidArgument: If there is no run at ``folder``.
            DamagedArtifact: If its configuration cannot be read.
        """
        if not folder.exists():
            raise InvalidArgument(f"There is no folder {str(folder)!r}. Give one that knowable fit has written.")
        if not is_run(folder):
            raise InvalidArgument(f"{str(folder)!r} is not a run: give a folder that knowable fit has written.")
        content = read_json(folder / CONFIG)
        return cls(folder, {key: value for key, value in content.items() if key != MADE}, content[MADE])

    def file(self, name: str) -> Path:
        """A file of the run, which must be there."""
        path = self.folder / name
        if not path.exists():
            raise DamagedArtifact(f"The run {str(self.folder)!r} is incomplete: {name} is missing. Fit again.")
        return path


def is_run(folder: Path) -> bool:
    """Whether ``folder`` was written by ``knowable fit``."""
    try:
        content = read_json(folder / CONFIG)
    except (OSError, DamagedArtifact):
        return False
    return isinstance(content.get(MADE), dict) and "knowable" in content[MADE]


def check_place(folder: Path, *, force: bool) -> None:
    """Refuse to overwrite: an empty folder is free, a run needs ``force``, anything else is never overwritten."""
    if not is_run(folder):
        check_folder(folder, name="--out")
    elif not force:
        raise InvalidArgument(f"--out {str(folder)!r} holds a run. Pass --force to overwrite it, or another name.")


@contextmanager
def new_run(folder: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write a run into; it takes its place when the block ends well, and vanishes when it does not."""
    check_place(folder, force=force)
    folder = Path(os.path.abspath(folder))
    above = next(each for each in folder.parents if each.is_dir())
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=above))
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())  # a temporary folder is private; a run is an ordinary folder
        _put(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(partial: Path, folder: Path) -> None:
    """Rename ``partial`` to ``folder``; what was there goes only once the new one is in its place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        os.rename(partial, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
    os.rename(folder, old)
    try:
        os.rename(partial, folder)
    except OSError:
        os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_file(path: Path, text: str, *, force: bool = True) -> None:
    """Write a text file atomically."""
    check_file(path, force=force)
    write_atomically(path, text)


def check_file(path: Path, *, force: bool) -> None:
    """Refuse a file that is there already, or whose folder is not."""
    if path.is_dir():
        raise InvalidArgument(f"--out {str(path)!r} is a folder. Give the name of a file.")
    if path.exists() and not force:
        raise InvalidArgument(f"--out {str(path)!r} is there already. Pass --force to overwrite it, or another name.")
    if not path.parent.is_dir():
        raise InvalidArgument(f"--out {str(path)!r}: there is no folder {str(path.parent)!r}. Make it first.")


def write_json(path: Path, content: Any) -> None:
    """Write JSON that every reader takes: numbers that are not finite become null."""
    write_file(path, json.dumps(finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise DamagedArtifact(f"{path} is not readable JSON: it was altered or cut short.") from None
    if not isinstance(content, dict):
        raise DamagedArtifact(f"{path} must hold a JSON object.")
    return content


def write_history(path: Path, records: Sequence[Mapping[str, float]]) -> None:
    """The records of a training as CSV, one line each."""
    names = list(dict.fromkeys(name for record in records for name in record)) or ["step", "epoch"]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
