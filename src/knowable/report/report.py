"""What a report says, as plain data.

A :class:`Report` is made of strings, numbers, tuples and dicts, so any test can read it and any renderer can draw it.
The figures in it are data too (:mod:`knowable.report.panels`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knowable.core.support.checks import check_choice
from knowable.errors import InvalidArgument
from knowable.report.panels import Panel


@dataclass(frozen=True)
class Column:
    """One score.

    Attributes:
        key: Its name in the mapping of scores.
        label: Its heading.
        better: ``"lower"``, ``"higher"``, ``"target"`` (nearest to ``target`` is best) or ``"none"``.
        target: The value a calibrated method would have.
        decimals: Digits shown after the point.
        percent: Whether it is a share, shown in percent.
        help: What it means, in plain words.
    """

    key: str
    label: str
    better: str = "lower"
    target: float | None = None
    decimals: int = 3
    percent: bool = False
    help: str = ""

    def __post_init__(self) -> None:
        check_choice("better", self.better, ("lower", "higher", "target", "none"))
        if (self.better == "target") != (self.target is not None):
            raise InvalidArgument(f"Column {self.key!r}: a target is given exactly when better='target'.")

    def loss(self, value: float) -> float:
        """A number that is smallest for the best method."""
        if self.better == "target":
            return abs(value - float(self.target or 0.0))
        return -value if self.better == "higher" else value

    def show(self, value: float) -> str:
        """The value as it is printed."""
        if not math.isfinite(value):
            return "–"
        return f"{100 * value:.{self.decimals}f}%" if self.percent else f"{value:.{self.decimals}f}"


@dataclass(frozen=True)
class Cell:
    """One score of one method."""

    value: float
    standard_error: float | None
    text: str
    error_text: str
    mark: str  # "best", "tied" (within one standard error of the best) or ""


@dataclass(frozen=True)
class ScoreTable:
    """Scores of several methods on the same rows.

    Attributes:
        title: What was scored.
        note: How it was scored (which rows, how many).
        columns: The scores.
        rows: ``(method, cells)`` pairs, cells in the order of ``columns``.
    """

    title: str
    note: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]

    @property
    def has_errors(self) -> bool:
        """Whether any score comes with a standard error."""
        return any(cell.standard_error is not None for _, cells in self.rows for cell in cells)

    def cell(self, method: str, key: str) -> Cell:
        """The cell of one method and score."""
        place = [column.key for column in self.columns].index(key)
        return dict(self.rows)[method][place]


@dataclass(frozen=True)
class Listing:
    """A table of words: headings and rows, the first cell of a row naming it.

    Attributes:
        title: What is listed.
        headings: Names of the columns.
        rows: The cells of each row.
        note: How to read it.
        lines: Where in the file each row comes from, for tables of rows of data: the figures mark the same row.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    lines: tuple[int, ...] = ()


@dataclass(frozen=True)
class Section:
    """One problem: what was done, what came out, and the figures."""

    title: str
    lead: str
    findings: tuple[str, ...] = ()
    tables: tuple[ScoreTable, ...] = ()
    panels: tuple[Panel, ...] = ()
    listings: tuple[Listing, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Notice:
    """A warning raised while making the report."""

    source: str
    text: str


@dataclass(frozen=True)
class Citation:
    """Something the report stands on, with its BibTeX."""

    name: str
    bibtex: str


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: Heading.
        lead: What this is, in a sentence or two.
        facts: ``(name, value)`` pairs on how it was made.
        notices: Warnings, shown before everything else.
        sections: The problems.
        reading: ``(term, explanation)`` pairs: how to read it.
        citations: What to cite.
    """

    title: str
    lead: str
    facts: tuple[tuple[str, str], ...] = ()
    notices: tuple[Notice, ...] = ()
    sections: tuple[Section, ...] = ()
    reading: tuple[tuple[str, str], ...] = ()
    citations: tuple[Citation, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts, lists and numbers; each panel carries its ``kind``."""
        return asdict(self)


def score_table(
    title: str,
    scores: Mapping[str, Mapping[str, float]],
    columns: Sequence[Column],
    *,
    note: str = "",
    standard_errors: Mapping[str, Mapping[str, float]] | None = None,
) -> ScoreTable:
    """Arrange scores by method and mark the best of each column.

    Args:
        title: What was scored.
        scores: Scores of each method, by the columns' keys; a missing one is shown as a dash.
        columns: Which scores to show, in order.
        note: How it was scored.
        standard_errors: Their standard errors, in the same shape. A method within one standard error of the best
            (its own error and the best one's, added in quadrature) is marked as tied.
    """
    errors = standard_errors or {}
    marks = {column.key: _marks(column, scores, errors) for column in columns}
    rows = tuple(
        (
            method,
            tuple(_cell(column, each, errors.get(method, {}), marks[column.key].get(method, "")) for column in columns),
        )
        for method, each in scores.items()
    )
    return ScoreTable(title, note, tuple(columns), rows)


def _cell(column: Column, scores: Mapping[str, float], errors: Mapping[str, float], mark: str) -> Cell:
    value = float(scores.get(column.key, math.nan))
    error = errors.get(column.key)
    error = float(error) if error is not None and math.isfinite(error) else None
    error_text = "" if error is None or not math.isfinite(value) else f"± {column.show(error)}"
    return Cell(value, error, column.show(value), error_text, mark)


def _marks(
    column: Column, scores: Mapping[str, Mapping[str, float]], errors: Mapping[str, Mapping[str, float]]
) -> dict[str, str]:
    """``best`` and ``tied`` methods of one column; nothing where there is no better or worse, or only one method."""
    losses = {
        method: column.loss(float(each[column.key]))
        for method, each in scores.items()
        if column.key in each and math.isfinite(each[column.key])
    }
    if column.better == "none" or len(losses) < 2:
        return {}
    best = min(losses, key=losses.__getitem__)

    def spread(method: str) -> float:
        pair = [errors.get(name, {}).get(column.key, 0.0) for name in (method, best)]
        return math.hypot(*(error if math.isfinite(error) else 0.0 for error in pair))

    tied = {method for method, loss in losses.items() if loss - losses[best] <= spread(method)}
    return {method: "best" if losses[method] == losses[best] else "tied" for method in tied | {best}}
