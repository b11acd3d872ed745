"""What a report says, as plain data.

A :class:`Report` is made of strings, numbers, tuples and dicts, so any test can read it and any renderer can draw it.
The figures in it are data too (:mod:`knowable.report.panels`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from knowable.report.panels import Panel
from knowable.report.scores import ScoreTable


@dataclass(frozen=True)
class Listing:
    """A table of words: headings and rows, the first cell of a row naming it."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    lines: tuple[int, ...] = ()  # of the file, one for each row: figures mark the same row
    marks: tuple[str, ...] = ()  # ``"best"``, ``"tied"`` or ``""`` for each row; empty highlights none


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
    """A whole report."""

    title: str
    lead: str
    facts: tuple[tuple[str, str], ...] = ()  # ``(name, value)`` pairs on how it was made
    notices: tuple[Notice, ...] = ()
    sections: tuple[Section, ...] = ()
    reading: tuple[tuple[str, str], ...] = ()  # ``(term, explanation)`` pairs: how to read it
    citations: tuple[Citation, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts, lists and numbers; each panel carries its ``kind``."""
        return asdict(self)
