"""A table as it was read: named columns, and where each row stands in its file."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from knowable.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Table:
    """Named columns of equal length.

    Attributes:
        frame: The columns, a pandas data frame with names that are text.
        source: What errors call it: the name of the file, or ``"the table"``.
        lines: The line of the file that each row is on, with the header on line 1; None where there is no file.
        notes: What a user should know of how it was read.
    """

    frame: pd.DataFrame
    source: str = "the table"
    lines: Sequence[int] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        if twice:
            raise InvalidData(
                f"{self.source} has two columns of the name {min(twice)!r}. Rename or remove one of them."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self.frame.columns)

    def __len__(self) -> int:
        return len(self.frame)

    def column(self, name: str) -> pd.Series:
        """The values of one column."""
        values: Any = self.frame[self.find(name)]
        return values

    def find(self, name: str) -> str:
        """``name`` if there is such a column, or an error that names the nearest."""
        if name in self.names:
            return name
        near = difflib.get_close_matches(str(name), self.names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Its columns are {listed(self.names)}."
        raise InvalidData(f"{self.source} has no column {name!r}.{hint}")

    def without(self, names: Iterable[str]) -> Table:
        """The table less some of its columns."""
        return replace(self, frame=self.frame.drop(columns=[self.find(name) for name in names]))

    def with_missing(self, codes: Iterable[str]) -> Table:
        """The table with values that equal one of the codes, as text or as a number, missing."""
        wanted = {code.strip() for code in codes}
        if not wanted:
            return self
        frame = self.frame.copy()
        for name in self.names:
            values = frame[name].astype(object)
            is_code = np.array([_same_as_any(value, wanted) for value in values], dtype=bool)
            if is_code.any():
                frame[name] = frame[name].where(~is_code)
        return replace(self, frame=frame)

    def where_all(self, places: Any, most: int = 5) -> str:
        """How a message names several rows: ``lines 3, 17 and 2 more``."""
        numbers = [int(row) if self.lines is None else int(self.lines[int(row)]) for row in places]
        kind = "line" if self.lines is not None else "row"
        return f"{kind}{'s' * (len(numbers) > 1)} {listed(numbers, most)}"

    def rows(self, chosen: Any) -> Table:
        """The rows at these positions, or those that a mask keeps, in that order."""
        index = np.asarray(chosen)
        index = np.flatnonzero(index) if index.dtype == bool else index
        lines = None if self.lines is None else [self.lines[int(row)] for row in index]
        return replace(self, frame=self.frame.iloc[index].reset_index(drop=True), lines=lines)

    def where(self, row: int | np.integer, name: str | None = None) -> str:
        """How an error names a row, or a row and a column."""
        place = f"row {row} (counting from 0)" if self.lines is None else f"line {self.lines[int(row)]}"
        start = "" if self.source == "the table" else f"{self.source}, "
        return f"{start}{place}" if name is None else f"{start}{place}, column {name!r}"

    def __repr__(self) -> str:
        return f"Table({self.source!r}, rows={len(self)}, columns={listed(self.names)})"


def _same_as_any(value: Any, codes: set[str]) -> bool:
    text = str(value).strip()
    if isinstance(value, float | np.floating) and float(value).is_integer():
        text = str(int(value))
    return text in codes


def listed(names: Iterable[Any], most: int = 8) -> str:
    """Names for a message, not too many of them."""
    found = [str(name) for name in names]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def as_table(frame: Any, source: str = "the table") -> Table:
    """A pandas data frame as a table: names become text, rows are counted from 0."""
    import pandas as pd

    if isinstance(frame.columns, pd.MultiIndex):
        raise InvalidArgument(f"{source} has names of several levels. Join them: frame.columns = ['_'.join(...), ...].")
    plain = frame.reset_index(drop=True).infer_objects()
    plain.columns = [str(name) for name in frame.columns]
    return Table(plain, source)
