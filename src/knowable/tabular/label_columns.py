"""Columns of categories, of ordered levels, and of yes and no."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from knowable.errors import InvalidArgument
from knowable.tabular.columns import (
    FALSE,
    TRUE,
    Column,
    find_missing,
    label_of,
    labels_of,
    parse_column,
    warn_of_unseen,
)
from knowable.tabular.table import Table

if TYPE_CHECKING:
    import pandas as pd

_MOST = 255  # categories with a place of their own
_TRUTH = {"1": 1.0, "0": 0.0, **dict.fromkeys(TRUE, 1.0), **dict.fromkeys(FALSE, 0.0)}


_AVERAGED = "Their predictions average over the known categories, and are wider for it."


@dataclass(frozen=True)
class CategoricalColumn(Column):
    """Categories: one number for each, 1 where the row has it and 0 elsewhere, and one for all others.

    Others are the rarest categories where there are more than 255, and those that were not in training; predictions for
    these average over the known categories, see :meth:`~knowable.tabular.schema.Schema.encodings`. What is missing
    becomes the most frequent category.
    """

    kind: ClassVar[str] = "categorical"

    categories: tuple[str, ...]  # those with a place of their own, in alphabetical order
    usual: str  # the most frequent one
    rare: int  # how many share the place of all others
    shares: tuple[float, ...] = ()  # share of each category in the training rows; empty where it was not kept

    @classmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> CategoricalColumn:
        """Count the categories."""
        values = table.column(name)
        missing = find_missing(values)
        counts = Counter(label for label, gap in zip(labels_of(values), missing, strict=True) if not gap)
        ordered = sorted(counts, key=lambda label: (-counts[label], label))
        kept = tuple(sorted(ordered[:_MOST]))
        shares = tuple(counts[label] / counts.total() for label in kept)
        return cls(name, bool(missing.any()), kept, ordered[0], max(0, len(ordered) - _MOST), shares)

    @property
    def varies(self) -> bool:
        """Whether the training rows had several categories."""
        return len(self.categories) > 1

    def _features(self) -> tuple[str, ...]:
        return (*(f"{self.name} = {category}" for category in self.categories), f"{self.name} = other")

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        place = {category: number for number, category in enumerate(self.categories)}
        labels = [self.usual if gap else label for label, gap in zip(labels_of(values), missing, strict=True)]
        other = len(self.categories)
        codes = np.array([place.get(label, other) for label in labels], dtype=int)
        if (codes == other).any() and not self.rare:  # else they may be some of the rare ones
            warn_of_unseen(table, self.name, codes == other, _AVERAGED if self.shares else "They share a place.")
        return np.eye(other + 1)[codes]

    def guesses(self, table: Table, count: int) -> list[np.ndarray]:
        """The unseen ones as known categories; none where they may be some of the rare ones."""
        return [] if self.rare else _guesses(self, table, self.categories, self.shares, count)


@dataclass(frozen=True)
class OrdinalColumn(Column):
    """Levels in an order: their number, centred and scaled. What is missing becomes the middle level."""

    kind: ClassVar[str] = "ordinal"

    levels: tuple[str, ...]  # from the lowest to the highest
    middle: float  # number of the median level in training
    centre: float  # mean number in training
    scale: float  # standard deviation of the numbers in training
    shares: tuple[float, ...] = ()  # share of each level in the training rows; empty where it was not kept

    @classmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> OrdinalColumn:
        """Take the order from ``given``, from the data frame, or from numbers."""
        values = table.column(name)
        missing = find_missing(values)
        levels = _levels(name, values, missing, given)
        rank = {level: float(number) for number, level in enumerate(levels)}
        wrong = f"is not one of its levels ({', '.join(levels)}). Correct it, or add it to kinds[{name!r}]."
        ranks = parse_column(table, name, rank.get, wrong)[~missing]
        middle = float(np.sort(ranks)[len(ranks) // 2])
        shares = tuple((np.bincount(ranks.astype(int), minlength=len(levels)) / len(ranks)).tolist())
        return cls(name, bool(missing.any()), levels, middle, float(ranks.mean()), float(ranks.std()), shares)

    @property
    def varies(self) -> bool:
        """Whether the training rows had several levels."""
        return self.scale > 0.0

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        rank = {level: float(number) for number, level in enumerate(self.levels)}
        labels = labels_of(values)
        unseen = _unseen(self, table, self.levels)
        if unseen.any():
            warn_of_unseen(table, self.name, unseen, _AVERAGED if self.shares else "They are taken for the middle one.")
        found = np.array(
            [self.middle if gap else rank.get(label, self.middle) for label, gap in zip(labels, missing, strict=True)]
        )
        return ((found - self.centre) / (self.scale or 1.0))[:, None]

    def guesses(self, table: Table, count: int) -> list[np.ndarray]:
        """The unseen ones as known levels."""
        return _guesses(self, table, self.levels, self.shares, count)


@dataclass(frozen=True)
class BooleanColumn(Column):
    """Yes or no: one number, centred and scaled. What is missing becomes the more frequent one."""

    kind: ClassVar[str] = "boolean"

    share: float  # share of yes in the training rows

    @classmethod
    def learn(cls, table: Table, name: str, given: Any = None) -> BooleanColumn:
        """Count."""
        found = as_truth(table, name)
        return cls(name, bool(np.isnan(found).any()), float(np.nanmean(found)))

    @property
    def varies(self) -> bool:
        """Whether the training rows had both values."""
        return 0.0 < self.share < 1.0

    def check(self, table: Table) -> list[str]:
        """Values must be yes or no, in one of the ways to say it."""
        as_truth(table, self.name)
        return []

    def _encode(self, values: pd.Series, missing: np.ndarray, table: Table) -> np.ndarray:
        found = np.where(missing, float(self.share >= 0.5), as_truth(table, self.name))
        scale = (self.share * (1 - self.share)) ** 0.5
        return ((found - self.share) / (scale or 1.0))[:, None]


def _unseen(column: Column, table: Table, known: Sequence[str]) -> np.ndarray:
    """Which rows have a category that is not known."""
    values, there = table.column(column.name), set(known)
    missing = find_missing(values)
    return np.array([not gap and label not in there for label, gap in zip(labels_of(values), missing, strict=True)])


def _guesses(
    column: Column, table: Table, known: Sequence[str], shares: Sequence[float], count: int
) -> list[np.ndarray]:
    """Encodings with the k-th of ``count`` quantiles of the known categories in place of those that are not known."""
    unseen = _unseen(column, table, known)
    if not shares or not unseen.any():
        return []
    bounds = np.cumsum(shares)
    found = []
    for quantile in (np.arange(count) + 0.5) / count * bounds[-1]:
        values = table.column(column.name).astype(object).mask(unseen, known[int(np.searchsorted(bounds, quantile))])
        found.append(column.encode(Table(values.to_frame(), table.source, table.lines)))
    return found


def as_truth(table: Table, name: str) -> np.ndarray:
    """A column of yes and no as 1 and 0, with NaN for what is missing."""
    wrong = f"is neither yes nor no. Write true or false, or say kinds={{{name!r}: 'categorical'}}."
    return parse_column(table, name, lambda label: _TRUTH.get(label.lower()), wrong)


def _levels(name: str, values: pd.Series, missing: np.ndarray, given: Any) -> tuple[str, ...]:
    import pandas as pd

    dtype: Any = values.dtype
    if isinstance(given, Sequence) and not isinstance(given, str):
        ordered = given
    elif isinstance(dtype, pd.CategoricalDtype) and dtype.ordered:
        ordered = dtype.categories
    elif pd.api.types.is_numeric_dtype(dtype):
        ordered = np.unique(values.to_numpy()[~missing])
    else:
        raise InvalidArgument(f"kinds[{name!r}]='ordinal' of texts needs their order: give a list, lowest first.")
    levels = tuple(label_of(level) for level in ordered)
    if len(set(levels)) < len(levels):
        raise InvalidArgument(f"kinds[{name!r}] must name every level once, got {list(levels)}.")
    return levels
