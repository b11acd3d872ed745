"""Reports: data first (:mod:`.content`, :mod:`.panels`), one self-contained HTML page second (:mod:`.render`)."""

from knowable.report.html import render, write
from knowable.report.report import Citation, Column, Notice, Report, ScoreTable, Section, score_table

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
