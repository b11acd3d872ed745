"""Panels drawn with matplotlib, as SVG to be put inside an HTML page.

Nothing global is touched: no pyplot, no backend switch, settings only within a context.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from knowable.core.support.figure import GRID, INK, figure_style
from knowable.errors import Unsupported
from knowable.report.figures import FIGURES, POINTS
from knowable.report.marks import Mark, marks_of
from knowable.report.panels import Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_PAGE_STYLE = {
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 9,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "knowable",
}


@dataclass(frozen=True)
class PlacedMark:
    """A point that can be read, in the units of the drawing: from its upper left corner, in points."""

    x: float
    y: float
    text: str
    row: int | None = None


@dataclass(frozen=True)
class Drawing:
    """An ``<svg>`` element with a text alternative, and what can be read off it."""

    svg: str
    marks: tuple[PlacedMark, ...]


def draw(panel: Panel, *, key: str) -> Drawing:
    """Draw a panel; ``key`` is a prefix, unique on the page, for the identifiers inside the drawing.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    drawing = FIGURES.get(panel.kind)
    if drawing is None:
        raise Unsupported(f"There is no drawing of kind {panel.kind!r}; there are {', '.join(sorted(FIGURES))}.")
    with figure_style(**_PAGE_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box; the words are in the text
        figure = drawing(panel)
        markup = _inline(_markup(figure), alt=panel.alt, key=key)
        return Drawing(markup, tuple(_placed(figure, marks_of(panel))))


def _markup(figure: Figure) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue()


def _placed(figure: Figure, marks: tuple[Mark, ...]) -> Iterator[PlacedMark]:
    """Marks where the figure, already laid out, has them; those outside its axes are left out."""
    height = figure.get_size_inches()[1] * POINTS
    for mark in marks:
        if not (math.isfinite(mark.x) and math.isfinite(mark.y)):
            continue
        axes = figure.axes[mark.plot]
        x, y = axes.transData.transform((mark.x, mark.y))
        if axes.bbox.padded(1.0).contains(x, y):
            yield PlacedMark(round(float(x), 1), round(float(height - y), 1), mark.text, mark.row)


def _inline(markup: str, *, alt: str, key: str) -> str:
    """Make a stand-alone SVG file fit to be an element of a page.

    The prolog, the metadata and the name spaces (which an HTML page does not need) go, identifiers get a prefix so that
    two figures do not share any, and the fixed size gives way to the page's.
    """
    body = markup[markup.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{key}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", body)
    view = re.search(r'viewBox="([^"]+)"', body)
    inside = body[body.index(">") + 1 :]
    opening = f'<svg viewBox="{view.group(1) if view else "0 0 1 1"}" role="img" aria-label="{escape(alt)}">'
    return opening + inside.strip()
