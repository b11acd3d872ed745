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
    """A table of words: headings and rows, the first cell of a row naming it.

    Attributes:
        title: What is listed.
        headings: Names of the columns.
        rows: The cells of each row.
        note: How to read it.
        lines: Where in the file each row comes from, for tables of rows of data: the figures mark the same row.
        marks: ``"best"``, ``"tied"`` or ``""`` for each row, to be highlighted; empty highlights none.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    lines: tuple[int, ...] = ()
    marks: tuple[str, ...] = ()


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
