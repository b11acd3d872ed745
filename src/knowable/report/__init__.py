"""Reports: data first (:mod:`.report`, :mod:`.panels`), one self-contained HTML page second (:mod:`.html`)."""

from knowable.report.html import render, write
from knowable.report.report import Citation, Listing, Notice, Report, Section

__all__ = ["Citation", "Listing", "Notice", "Report", "Section", "render", "write"]
