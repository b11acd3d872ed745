"""Reports: data first (:mod:`.content`, :mod:`.panels`), one self-contained HTML page second (:mod:`.render`)."""

from knowable.interfaces.report.content import Citation, Column, Notice, Report, ScoreTable, Section, score_table
from knowable.interfaces.report.render import render, write

__all__ = [
    "Citation",
    "Column",
    "Notice",
    "Report",
    "ScoreTable",
    "Section",
    "render",
    "score_table",
    "write",
]
