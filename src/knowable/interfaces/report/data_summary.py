"""The columns of a table in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from knowable.interfaces.report.content import Listing

if TYPE_CHECKING:
    from pandas import DataFrame, Series

_MOST = 60  # columns of the table


def data_listing(frame: DataFrame, kinds: Mapping[str, str], target: str) -> Listing:
    """One row for each column: its kind, what is missing, and what it holds; the outcome first.

    Args:
        frame: All rows, as the user gave them.
        kinds: The kind of every input that is used.
        target: Name of the outcome.
    """
    others = [name for name in frame.columns if name != target]
    shown = [target, *others][: _MOST + 1]
    columns: dict[Any, Any] = {name: frame[name] for name in shown}
    rows = tuple(_row(str(name), column, _kind(name, kinds, target)) for name, column in columns.items())
    left = len(others) + 1 - len(shown)
    note = f"{left} more columns are not listed." if left else ""
    return Listing("Columns", ("Column", "Kind", "Missing", "Distinct", "Holds"), rows, note)


def _kind(name: Any, kinds: Mapping[str, str], target: str) -> str:
    if name == target:
        return "outcome"
    return kinds.get(str(name), "not used")


def _row(name: str, values: Series, kind: str) -> tuple[str, ...]:
    missing = int(values.isna().sum())
    share = f"{missing} ({missing / max(1, len(values)):.0%})" if missing else "none"
    return name, kind, share, str(values.nunique()), _holds(values.dropna())


def _holds(values: Series) -> str:
    """A range with the middle for numbers and dates; the most frequent values for everything else."""
    import pandas

    if not len(values):
        return "nothing"
    types = pandas.api.types
    if types.is_bool_dtype(values):
        return f"true in {values.astype(bool).mean():.0%}"
    if types.is_numeric_dtype(values):
        return f"{values.min():.5g} to {values.max():.5g}, median {values.median():.5g}"
    if types.is_datetime64_any_dtype(values):
        return f"{values.min():%Y-%m-%d} to {values.max():%Y-%m-%d}"
    counts = values.astype(str).value_counts()
    named = ", ".join(f"{_cut(str(value))} ({count})" for value, count in counts.head(3).items())
    return f"{named}{', …' if len(counts) > 3 else ''}"


def _cut(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:23]}…"
