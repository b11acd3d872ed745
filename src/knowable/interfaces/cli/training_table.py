"""A table to learn from: read, checked against everything that can be wrong with it, and divided."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knowable.core.support.checks import check_number
from knowable.errors import InvalidData
from knowable.interfaces.cli.messages import collected, refuse_doubtful, spoken_for_the_shell
from knowable.report.report import Notice
from knowable.tabular.reading import read_table
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

_FEWEST_HELD_OUT = 2
_FEWEST_TRAINING = 4


@dataclass(frozen=True)
class TrainingTable:
    """A table that can be learned from."""

    table: Table  # all its columns but those that were dropped
    target: str
    schema: Schema  # what its columns are, told from all rows
    notices: tuple[Notice, ...] = ()  # what looked wrong with it

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
    target: str,
    *,
    task: str | None = None,
    drop: Sequence[str] = (),
    kinds: Mapping[str, Any] | None = None,
    lenient: bool = False,
) -> TrainingTable:
    """Read a file and find out what its columns are.

    Raises:
        InvalidData: With the line and the column, and a way out.
    """
    with spoken_for_the_shell():
        table = read_table(source).without(drop)
        name = table.find(target)
        with collected() as found:
            schema = Schema.learn(table, name, task, kinds or None)
        refuse_doubtful(found, lenient=lenient)
    notes = [Notice("Data", f"{note[0].upper()}{note[1:]}.") for note in schema.notes]
    return TrainingTable(table, name, schema, (*found, *notes))


def lines_of(table: Table) -> list[int]:
    """Where each row is: its line in a text file, else its number from 0."""
    return list(range(len(table))) if table.lines is None else [int(line) for line in table.lines]


def divide(outcomes: np.ndarray, share: float, *, classes: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions of training and held-out rows, chosen at random and in order; none held out where ``share`` is 0.

    Of classes, each gives the same share, and keeps at least one row for training.

    Raises:
        InvalidArgument: If ``share`` is not between 0 and 0.9.
        InvalidData: If there are too few rows.
    """
    share = check_number("holdout", share, at_least=0.0, at_most=0.9)
    rows = len(outcomes)
    if share == 0.0:
        return np.arange(rows), np.arange(0)
    generator = np.random.default_rng(seed)
    held = _of_each_class(outcomes, share, generator) if classes else _some(np.arange(rows), share, generator)
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


def file_hash(source: str) -> str | None:
    """SHA-256 of a file; None for standard input."""
    if source == "-":
        return None
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
