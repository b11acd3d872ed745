"""The schema: what the columns of a table are, learned once and enforced ever after."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import knowable.tabular.label_columns
import knowable.tabular.number_columns  # noqa: F401  (these register kinds of columns)
from knowable._version import __version__
from knowable.core.support.checks import check_choice
from knowable.errors import DamagedArtifact, InvalidArgument, InvalidData, InvalidType, KnowableWarning
from knowable.tabular.columns import Column, learn_column
from knowable.tabular.table import Table, listed
from knowable.tabular.targets import (
    TASKS,
    ClassTargets,
    NumberTargets,
    Targets,
    asked_of_numbers,
    infer_task,
    refuse_hopeless,
    target_values,
    targets_from_json,
)

FORMAT = 1
MOST_FEATURES = 5_000  # numbers that a row may become
GUESSES = 16  # known categories that a prediction for a new one averages over


@dataclass(frozen=True)
class Schema:
    """Columns in, numbers out, and what is predicted from them.

    Attributes:
        columns: The columns in use, in the order of the training table.
        dropped: Columns that were left out, and why.
        targets: What is predicted; None until it is known.
        rows: How many rows it was learned from.
        version: The version of knowable that learned it.
        remarks: What else a user should know, or is asked, of how the columns were read; not kept in files.
    """

    columns: tuple[Column, ...]
    dropped: Mapping[str, str] = field(default_factory=dict)
    targets: Targets | None = None
    rows: int = 0
    version: str = __version__
    remarks: tuple[str, ...] = ()

    @classmethod
    def learn(
        cls,
        table: Table,
        target: str | Iterable[str] | None,
        task: str | None = None,
        kinds: Mapping[str, Any] | None = None,
    ) -> Schema:
        """Learn what the columns are.

        Args:
            table: The training rows.
            target: The column to predict, or several of them (of numbers). None: all columns are inputs.
            task: ``"regression"`` or ``"classification"``; None tells it from the target.
            kinds: What some columns are, by name: ``"numeric"``, ``"categorical"``, ``"boolean"``, ``"date"``,
                ``"ordinal"``, a list of levels, or ``"ignore"``. The others are told from their values.

        Example:
            >>> from knowable.tabular import read_table
            >>> table = read_table({"size": [1.0, 2.0, 4.0], "colour": ["red", "blue", "red"], "y": [1.5, 2.5, 3.5]})
            >>> Schema.learn(table, "y").feature_names
            ('size', 'colour = blue', 'colour = red', 'colour = other')
        """
        kinds = check_kinds(kinds, table)
        wanted = () if target is None else (target,) if isinstance(target, str) else tuple(target)
        names = tuple(table.find(name) for name in wanted)
        targets, asked = (None, []) if not names else _learn_targets(table, names, task, kinds)
        inputs = table.without(names)
        if not inputs.names:
            raise InvalidData(
                f"{table.source} has the target {listed(names)} and no other column to predict it from."
                if names
                else f"{table.source} has no columns."
            )
        if len(inputs.names) > MOST_FEATURES:
            raise InvalidData(
                f"{table.source} has {len(inputs.names):,} columns; at most {MOST_FEATURES:,} can be used. Choose some "
                f"of them, or reduce them first (sklearn.decomposition.PCA)."
            )
        found = {name: learn_column(inputs, name, kinds.get(name)) for name in inputs.names}
        columns = tuple(column for column in found.values() if isinstance(column, Column))
        remarks = [remark for column in columns if column.name not in kinds for remark in column.remarks(inputs)]
        schema = cls(
            columns=columns, dropped={name: why for name, why in found.items() if isinstance(why, str)},
            targets=targets, rows=len(table), remarks=(*table.notes, *asked, *remarks),
        )  # fmt: skip
        schema._refuse_what_is_useless(table)
        return schema

    def _refuse_what_is_useless(self, table: Table) -> None:
        if not self.columns:
            name, why = next(iter(self.dropped.items()))
            texts = f" Turn texts into numbers or a few categories, or say kinds={{{name!r}: 'categorical'}}."
            raise InvalidData(
                f"{table.source} has no column to learn from: none varies ({name!r}: {why}). Check that it was read "
                f"as you meant.{texts if 'another text' in why else ''}"
            )
        if len(self.feature_names) > MOST_FEATURES:
            widest = max(self.columns, key=lambda column: len(column.features))
            raise InvalidData(
                f"The columns of {table.source} become {len(self.feature_names):,} numbers a row; at most "
                f"{MOST_FEATURES:,} can be used. Leave out the widest: kinds={{{widest.name!r}: 'ignore'}}."
            )

    @property
    def task(self) -> str | None:
        """``"regression"``, ``"classification"``, or None where the target is not known."""
        if self.targets is None:
            return None
        return "classification" if isinstance(self.targets, ClassTargets) else "regression"

    @property
    def target(self) -> tuple[str, ...]:
        """Names of the targets."""
        return () if self.targets is None else self.targets.names

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the numbers that a row becomes."""
        return tuple(name for column in self.columns for name in column.features)

    @property
    def groups(self) -> dict[str, slice]:
        """Which of these numbers come from which column."""
        found, first = {}, 0
        for column in self.columns:
            found[column.name] = slice(first, first + len(column.features))
            first += len(column.features)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how the table was read."""
        return (*(f"column {name!r} is left out: {why}" for name, why in self.dropped.items()), *self.remarks)

    def check(self, table: Table) -> None:
        """Hold a table against the schema.

        Raises:
            InvalidData: If a column is missing or has values of another type, by name.

        Warns:
            KnowableWarning: If numbers have jumped as if their unit had changed, by name.
        """
        missing = [column.name for column in self.columns if column.name not in table.names]
        if missing:
            raise InvalidData(
                f"{table.source} lacks the column{'s' * (len(missing) > 1)} {listed(missing)} that the model was "
                f"fitted with. It has {listed(table.names)}."
            )
        for column in self.columns:
            for remark in column.check(table):
                warnings.warn(f"In {table.source} {remark}", KnowableWarning, stacklevel=3)

    def encode(self, table: Table) -> np.ndarray:
        """The rows as numbers, ``(rows, len(feature_names))`` in single precision, after a :meth:`check`."""
        self.check(table)
        blocks = [column.encode(table) for column in self.columns]
        return np.concatenate(blocks, axis=1).astype(np.float32)

    def encodings(self, table: Table) -> list[np.ndarray]:
        """The rows as numbers, as :meth:`encode` gives them; several where a row has a category that is new.

        Each of these has known categories in its place, as often as the training rows have them. The mean of their
        predictions is that of a category drawn from the same population. Rows without a new category are the same in
        all of them.
        """
        self.check(table)
        blocks = [column.encode(table) for column in self.columns]
        guessed = {place: column.guesses(table, GUESSES) for place, column in enumerate(self.columns)}
        guessed = {place: found for place, found in guessed.items() if found}
        orders = {place: np.random.default_rng(place).permutation(GUESSES) for place in guessed}
        variants = [
            [guessed[place][orders[place][number]] if place in guessed else block for place, block in enumerate(blocks)]
            for number in range(GUESSES if guessed else 1)
        ]
        return [np.concatenate(each, axis=1).astype(np.float32) for each in variants]

    def target_of(self, table: Table) -> np.ndarray:
        """The target of every row of a table that has it, in the user's units or labels."""
        if self.task is None or not self.target:
            raise InvalidArgument("This schema was learned without the name of a target. Pass y yourself.")
        return target_values(table, self.target, self.task)

    def predicting(self, targets: Targets) -> Schema:
        """The same columns, to predict ``targets``."""
        return replace(self, targets=targets)

    def to_json(self) -> dict[str, Any]:
        """As plain values, which ``json.dumps`` takes."""
        return {
            "format": FORMAT,
            "version": self.version,
            "rows": self.rows,
            "columns": [column.to_json() for column in self.columns],
            "dropped": dict(self.dropped),
            "target": None if self.targets is None else self.targets.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any] | str) -> Schema:
        """Back from plain values, or from the text of a JSON file."""
        try:
            content: Mapping[str, Any] = json.loads(saved) if isinstance(saved, str) else saved
            if content["format"] > FORMAT:
                raise DamagedArtifact(
                    f"The schema has format {content['format']}; this version of knowable reads up to {FORMAT}. "
                    f"Upgrade knowable."
                )
            target = content["target"]
            return cls(
                columns=tuple(Column.from_json(column) for column in content["columns"]),
                dropped=dict(content["dropped"]),
                targets=None if target is None else targets_from_json(target),
                rows=content["rows"],
                version=content["version"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedArtifact(f"The schema cannot be read: {error!r}. Fit again.") from None

    def __repr__(self) -> str:
        kinds = ", ".join(f"{column.name}: {column.kind}" for column in self.columns[:8])
        more = f" and {len(self.columns) - 8} more" if len(self.columns) > 8 else ""
        return f"Schema({kinds}{more} -> {listed(self.target) or self.task or 'nothing yet'})"


def check_kinds(kinds: Mapping[str, Any] | None, table: Table) -> Mapping[str, Any]:
    """What the user says of columns, or an error if a name is not one of the table's."""
    if kinds is None:
        return {}
    if not isinstance(kinds, Mapping):
        raise InvalidType(f"kinds must be a mapping such as {{'zip': 'categorical'}}, got {type(kinds).__name__}.")
    for name in kinds:
        table.find(name)
    return kinds


def _learn_targets(
    table: Table, names: tuple[str, ...], task: str | None, kinds: Mapping[str, Any]
) -> tuple[Targets, list[str]]:
    """The targets, and what a user should be asked about them."""
    found = infer_task(table, names) if task is None else check_choice("task", task, TASKS)
    y = target_values(table, names, found)
    refuse_hopeless(table, names, y, found, kinds)
    if found == "classification":
        return ClassTargets.learn(y, names), []
    asked = asked_of_numbers(names[0], y) if task is None and len(names) == 1 else []
    return NumberTargets.learn(y, names), asked
