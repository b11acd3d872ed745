"""What is known of every fit, kept as one line of JSON each, so that a run that was killed goes on where it was."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from knowable.core.support.files import as_file, write_atomically
from knowable.errors import InvalidArgument

FORMAT = 1
FILE_NAME = "comparison.jsonl"
"""The file's name where only a folder is given."""
_KIND = "knowable comparison"


@dataclass(frozen=True)
class Record:
    """One method on one fold."""

    method: str
    settings: str  # what makes it this method
    fold: int
    reference: str = ""  # settings of the method it was held against; empty if none
    scores: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)  # distances from the reference, by name
    converged: bool | None = None  # whether the fit had settled; None if that cannot be told
    message: str = ""
    warnings: tuple[str, ...] = ()
    error: str | None = None  # why there are no scores; None if there are
    elapsed: float = 0.0  # seconds that all of it took: fitting, predicting, scoring
    rows: dict[str, list[float]] = field(default_factory=dict)  # the values behind scores that are means over rows

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"warnings": list(self.warnings)}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Record:
        """Back from plain values."""
        fields: dict[str, Any] = {**saved, "warnings": tuple(saved["warnings"])}
        return cls(**fields)


class Journal:
    """The finished fits of one comparison, in a file that grows by whole lines, or in memory only.

    The first line says which comparison it is; another one is refused. The last line of a run that was killed while
    writing it is cut off. Fits that failed are not kept: they are tried again by the next run.

    Args:
        path: The file, a folder for it, or None to keep nothing.
        identity: What makes this comparison this one.

    Raises:
        InvalidArgument: If the file is something else, or belongs to another comparison.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: dict[str, str]):
        self.path = None if path is None else _file(path)
        self._records: dict[tuple[str, str, int], Record] = {}
        if self.path is None:
            return
        if self.path.exists() and self.path.stat().st_size:
            self._read(identity)
        else:
            write_atomically(self.path, _line({"kind": _KIND, "format": FORMAT, "identity": identity}))

    def __len__(self) -> int:
        return len(self._records)

    @property
    def seconds(self) -> float:
        """Time that the fits in it took."""
        return sum(record.elapsed for record in self._records.values())

    def find(self, settings: str, reference: str, fold: int) -> Record | None:
        """The finished fit of a method on a fold, held against that reference."""
        return self._records.get((settings, reference, fold))

    def add(self, record: Record) -> None:
        """Keep a fit: one write of one line, on the disk before this returns."""
        if record.error is not None:
            return
        self._records[record.settings, record.reference, record.fold] = record
        if self.path is None:
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(handle, _line(record.to_json()).encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def _read(self, identity: dict[str, str]) -> None:
        assert self.path is not None
        whole = self.path.read_bytes()
        lines = whole.split(b"\n")
        _check(self.path, lines[0], identity)
        if lines[-1]:  # torn: it has no end
            os.truncate(self.path, len(whole) - len(lines[-1]))
        for number, line in enumerate(lines[1:-1], 2):
            try:
                record = Record.from_json(json.loads(line))
            except (ValueError, TypeError, KeyError):
                raise InvalidArgument(
                    f"out {str(self.path)!r} was altered: its line {number} is not a finished fit. Delete that line."
                ) from None
            self._records[record.settings, record.reference, record.fold] = record


def _file(path: str | os.PathLike[str]) -> Path:
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        return Path(path) / FILE_NAME
    return as_file(path, name="out")


def _check(path: Path, first: bytes, identity: dict[str, str]) -> None:
    """Refuse another file, a newer format, and another comparison."""
    try:
        header = json.loads(first)
        known = header["kind"] == _KIND and header["identity"]
        version = header["format"]
    except (ValueError, TypeError, KeyError):
        known, version = None, FORMAT
    if not isinstance(known, dict):
        raise InvalidArgument(f"out {str(path)!r} is a file of another kind and is left as it is. Give another name.")
    if version > FORMAT:
        raise InvalidArgument(
            f"out {str(path)!r} was written by a newer version of knowable. Upgrade, or give another name."
        )
    different = sorted(key for key in known.keys() | identity.keys() if known.get(key) != identity.get(key))
    if different:
        raise InvalidArgument(
            f"out {str(path)!r} belongs to another comparison: {', '.join(different)} "
            f"differ{'s' if len(different) == 1 else ''}. Give another name or delete it."
        )


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content) + "\n"
