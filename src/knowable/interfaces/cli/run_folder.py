"""Runs are folders: written whole or not at all, and nothing is overwritten unasked.

- ``config.json``: the options of the command, and under ``made`` how the run was made;
- ``schema.json``: what the columns are, as learned from the training rows;
- ``estimator.json`` and ``posterior/``: the fitted estimator, numbers and text, never code;
- ``certificate/``: what held-out rows prove of it, where ``knowable certify`` was run;
- ``history.csv``: the records of the training; only a header where there are none;
- ``scores.json``: scores on the held-out rows with standard errors;
- ``report.json`` and ``report.html``: the report as data, and for people (where matplotlib and jinja2 are
  installed).

A run may also be a single file, ``name.knowable``, with the same content.
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

from knowable.core.storage.files import SUFFIX, Files, check_file_place, destination, saving
from knowable.core.support.files import check_folder, replace_folder, write_atomically
from knowable.errors import DamagedArtifact, InvalidArgument
from knowable.interfaces.cli.options import MADE
from knowable.report.html import finite

CONFIG, SCHEMA, POSTERIOR, CERTIFICATE = "config.json", "schema.json", "posterior", "certificate"
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
        content = Files.at(folder).read_json(CONFIG)
        return cls(folder, {key: value for key, value in content.items() if key != MADE}, content[MADE])

    def read_text(self, name: str) -> str:
        """A file of the run, which must be there."""
        files = Files.at(self.folder)
        if not files.has(name):
            raise DamagedArtifact(f"The run {str(self.folder)!r} is incomplete: {name} is missing. Fit again.")
        try:
            return files.read(name).decode()
        except UnicodeDecodeError:
            raise DamagedArtifact(f"{name} of the run {str(self.folder)!r} is not text: it was altered.") from None


def is_run(folder: Path) -> bool:
    """Whether ``folder``, or the single file of that name, was written by ``knowable fit``."""
    try:
        content = Files.at(folder).read_json(CONFIG)
    except DamagedArtifact:
        return False
    return isinstance(content, dict) and isinstance(content.get(MADE), dict) and "knowable" in content[MADE]


def check_place(folder: Path, *, force: bool) -> None:
    """Refuse to overwrite: an empty folder is free, a run needs ``force``, anything else is never overwritten."""
    if is_run(folder):
        if not force:
            raise InvalidArgument(f"--out {str(folder)!r} holds a run. Pass --force to overwrite it, or another name.")
    elif folder.suffix == SUFFIX:
        check_file_place(folder, overwrite=False)
    else:
        check_folder(folder, name="--out")


@contextmanager
def new_run(folder: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write a run into; it takes its place when the block ends well, and vanishes when it does not.

    A name that ends in ``.knowable`` is that of a single file with the run in it.
    """
    check_place(folder, force=force)
    if folder.suffix == SUFFIX:
        with destination(folder, overwrite=force) as partial:
            partial.mkdir()
            yield partial
        return
    folder = Path(os.path.abspath(folder))
    above = next(each for each in folder.parents if each.is_dir())
    with saving(folder):
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=above))
        try:
            yield partial
            partial.chmod(0o777 & ~_umask())  # a temporary folder is private; a run is an ordinary folder
            replace_folder(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


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
