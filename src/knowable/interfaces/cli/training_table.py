"""A table to learn from: read, checked against everything that can be wrong with it, and divided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knowable.core.support.checks import check_number
from knowable.errors import InvalidArgument, InvalidData
from knowable.interfaces.cli.messages import collected, refuse_doubtful, spoken_for_the_shell
from knowable.report.report import Notice
from knowable.tabular.columns import find_missing, labels_of
from knowable.tabular.number_columns import DateColumn, as_seconds
from knowable.tabular.reading import read_table
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table, listed

if TYPE_CHECKING:
    from pandas import DataFrame

_FEWEST_HELD_OUT = 2
_FEWEST_TRAINING = 4


@dataclass(frozen=True)
class TrainingTable:
    """A table that can be learned from."""

    table: Table  # all its columns but those that were dropped, or that only name rows or groups
    target: str
    schema: Schema  # what its columns are, told from all rows
    notices: tuple[Notice, ...] = ()  # what looked wrong with it
    groups: np.ndarray | None = None  # the group of every row, where whole groups are held out
    times: np.ndarray | None = None  # the time of every row, where the latest are held out

    @property
    def task(self) -> str:
        """``"regression"`` or ``"classification"``."""
        assert self.schema.task is not None
        return self.schema.task

    @property
    def inputs(self) -> DataFrame:
        """All columns but the target."""
        return self.table.without([self.target]).frame

    @property
    def outcomes(self) -> np.ndarray:
        """The target of every row: numbers or labels."""
        return self.schema.target_of(self.table)


def read_training(
    source: str,
    target: str | None,
    *,
    task: str | None = None,
    drop: Sequence[str] = (),
    kinds: Mapping[str, Any] | None = None,
    identifiers: Sequence[str] = (),
    missing: Sequence[str] = (),
    group: str | None = None,
    time: str | None = None,
    lenient: bool = False,
) -> TrainingTable:
    """Read a file and find out what its columns are.

    Raises:
        InvalidData: With the line and the column, and a way out.
    """
    if group is not None and time is not None:
        raise InvalidArgument("--group and --time cannot be combined: choose how rows are held out.")
    with spoken_for_the_shell():
        whole = read_table(source).with_missing(missing)
        if target is None:
            raise InvalidArgument(
                f"--target is missing: which column is to be predicted? The columns of {whole.source} are "
                f"{listed(whole.names)}."
            )
        groups = None if group is None else _groups(whole, group)
        times = None if time is None else _times(whole, time)
        apart: list[str] = list(dict.fromkeys([*drop, *identifiers, *([group] if group else [])]))
        if target in apart:
            raise InvalidArgument(f"--target {target} is also dropped, an --id or the --group. It can only be one.")
        table = whole.without(apart)
        name = table.find(target)
        with collected() as found:
            schema = Schema.learn(table, name, task, kinds or None)
        refuse_doubtful(found, lenient=lenient)
    notes = [notice_of(note) for note in schema.notes]
    if group is not None:
        notes.append(Notice("Data", f"Whole groups of {group!r} are held out, and {group!r} is no input."))
    if time is not None:
        notes.append(Notice("Data", f"The latest rows by {time!r} are held out."))
    return TrainingTable(table, name, schema, (*found, *notes), groups, times)


def notice_of(note: str) -> Notice:
    """What was noted of a table, as a sentence."""
    return Notice("Data", f"{note[0].upper()}{note[1:]}.")


def _groups(table: Table, name: str) -> np.ndarray:
    """The group of every row, by number."""
    values = table.column(name)
    gaps = np.flatnonzero(find_missing(values))
    if len(gaps):
        raise InvalidData(f"{table.where(gaps[0], name)}: the group is missing. Fill it in, or remove the row.")
    return np.unique(np.array(labels_of(values)), return_inverse=True)[1]


def _times(table: Table, name: str) -> np.ndarray:
    """The time of every row: numbers, or dates in seconds."""
    values = table.column(name)
    gaps = np.flatnonzero(find_missing(values))
    if len(gaps):
        raise InvalidData(f"{table.where(gaps[0], name)}: the time is missing. Fill it in, or remove the row.")
    if values.dtype.kind in "iuf":
        return values.to_numpy(dtype=float)
    return as_seconds(table, name, DateColumn.learn(table, name).day_first)


def lines_of(table: Table) -> list[int]:
    """Where each row is: its line in a text file, else its number from 0."""
    return list(range(len(table))) if table.lines is None else [int(line) for line in table.lines]


def divide(
    outcomes: np.ndarray,
    share: float,
    *,
    classes: bool,
    seed: int,
    groups: np.ndarray | None = None,
    times: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions of training and held-out rows, chosen at random and in order; none held out where ``share`` is 0.

    Of classes, each gives the same share, and keeps at least one row for training. With ``groups`` whole groups are
    held out, chosen at random until they have the share; with ``times`` the latest rows, rows of one time together.

    Raises:
        InvalidArgument: If ``share`` is not between 0 and 0.9.
        InvalidData: If there are too few rows.
    """
    share = check_number("holdout", share, at_least=0.0, at_most=0.9)
    rows = len(outcomes)
    if share == 0.0:
        return np.arange(rows), np.arange(0)
    generator = np.random.default_rng(seed)
    if groups is not None:
        held = _whole_groups(groups, share, generator)
    elif times is not None:
        held = np.flatnonzero(times > np.sort(times)[max(0, rows - round(share * rows) - 1)])
    elif classes:
        held = _of_each_class(outcomes, share, generator)
    else:
        held = _some(np.arange(rows), share, generator)
    if len(held) < _FEWEST_HELD_OUT or rows - len(held) < _FEWEST_TRAINING:
        raise InvalidData(
            f"{rows} rows are too few to hold a share of {share:g} out and learn from the others. Give more rows, or "
            f"pass --holdout 0 to fit to all of them without scores that count."
        )
    training = np.setdiff1d(np.arange(rows), held)
    return training, np.sort(held)


def _of_each_class(labels: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    _, codes = np.unique(labels, return_inverse=True)
    groups = [np.flatnonzero(codes == code) for code in range(codes.max() + 1)]
    return np.concatenate([_some(group, share, generator, keep=1) for group in groups])


def _some(places: np.ndarray, share: float, generator: np.random.Generator, *, keep: int = 0) -> np.ndarray:
    """A random share of places; a fraction of a row is held out with its probability."""
    wanted = share * len(places)
    count = int(wanted) + int(generator.random() < wanted - int(wanted))
    return generator.permutation(places)[: min(count, len(places) - keep)]


def _whole_groups(groups: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    """Rows of groups taken at random, as long as that brings their share nearer to what is wanted."""
    wanted, held = share * len(groups), np.zeros(len(groups), dtype=bool)
    for group in generator.permutation(np.unique(groups)):
        size = (groups == group).sum()
        if abs(held.sum() + size - wanted) < abs(held.sum() - wanted):
            held |= groups == group
    return np.flatnonzero(held)


def folds_of(table: TrainingTable, count: int, *, seed: int) -> int | list[tuple[np.ndarray, np.ndarray]]:
    """Folds of whole groups; or of later and later rows, each predicted from those before; or their number.

    Raises:
        InvalidData: If there are too few groups or times.
    """
    rows = len(table.table)
    if table.groups is not None:
        groups = table.groups
        there = np.unique(groups)
        if len(there) < count:
            raise InvalidData(f"There are {len(there)} groups, fewer than {count} folds. Pass a smaller --cv.")
        fold_of = np.empty(len(there), dtype=int)
        sizes = np.zeros(count, dtype=int)
        shuffled = np.random.default_rng(seed).permutation(there)
        for group in sorted(shuffled, key=lambda each: -int((groups == each).sum())):  # the largest first
            fold_of[group] = sizes.argmin()
            sizes[fold_of[group]] += (groups == group).sum()
        fold = fold_of[groups]
        return [(np.flatnonzero(fold != each), np.flatnonzero(fold == each)) for each in range(count)]
    if table.times is None:
        return count
    block = np.searchsorted(np.sort(table.times), table.times) * (count + 1) // rows  # rows of one time together
    pairs = [(np.flatnonzero(block < each), np.flatnonzero(block == each)) for each in range(1, count + 1)]
    if any(len(train) < _FEWEST_TRAINING or len(test) < 1 for train, test in pairs):
        raise InvalidData(f"There are too few different times for {count} folds. Pass a smaller --cv.")
    return pairs


def file_hash(source: str) -> str | None:
    """SHA-256 of a file; None for standard input."""
    if source == "-":
        return None
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
