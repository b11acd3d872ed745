"""Panels drawn with matplotlib, as SVG to be put inside an HTML page.

Nothing global is touched: no pyplot, no backend switch, settings only within a context.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from knowable.errors import MissingExtra, Unsupported
from knowable.report import run_drawings, style
from knowable.report.canvas import POINTS, finish, new_figure, per_cent
from knowable.report.marks import Mark, marks_of
from knowable.report.panels import BandPanel, CalibrationPanel, CurvesPanel, Line, NoisePanel, Panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    """Draw a panel.

    Args:
        panel: What to draw.
        key: A prefix, unique on the page, for the identifiers inside the drawing.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    drawing = _DRAWINGS.get(panel.kind)
    if drawing is None:
        raise Unsupported(f"There is no drawing of kind {panel.kind!r}; there are {', '.join(sorted(_DRAWINGS))}.")
    matplotlib = _matplotlib()
    settings = {**matplotlib.rcParamsDefault, **style.RC, "backend": "agg"}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # drawn as a box; the words are in the text
        figure = drawing(panel)
        markup = _inline(_markup(figure), alt=panel.alt, key=key)
        return Drawing(markup, tuple(_placed(figure, marks_of(panel))))


def svg(panel: Panel, *, key: str) -> str:
    """The ``<svg>`` element of a panel; see :func:`draw`."""
    return draw(panel, key=key).svg


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra(
            "Figures need matplotlib, which is not installed. Run: pip install knowable[report]"
        ) from None
    return matplotlib


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


def _band(panel: BandPanel) -> Figure:
    figure = new_figure()
    axes = figure.add_subplot()
    share = f"{panel.level:.0%}"
    axes.fill_between(panel.x, panel.low, panel.high, color=style.ALEATORIC_BAND, lw=0, label=f"total, {share}")
    if any(high > low for low, high in zip(panel.epistemic_low, panel.epistemic_high, strict=True)):
        axes.fill_between(
            panel.x,
            panel.epistemic_low,
            panel.epistemic_high,
            color=style.EPISTEMIC_BAND,
            lw=0,
            label=f"epistemic, {share}",
        )
    if panel.truth:
        axes.plot(panel.x, panel.truth, color=style.INK, ls="--", lw=1.2, label="truth")
    axes.plot(panel.x, panel.mean, color=style.MEAN, label="mean")
    if panel.data_x:
        axes.plot(panel.data_x, panel.data_y, ".", color=style.DATA, ms=4, alpha=0.8, label="data")
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _noise(panel: NoisePanel) -> Figure:
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot(panel.x, panel.noise, color="#0072b2", label="predicted noise sd")
    axes.errorbar(
        panel.local_x,
        panel.local_std,
        yerr=panel.local_error,
        fmt="o",
        color=style.DATA,
        ms=5,
        capsize=3,
        lw=1.2,
        label="residual sd nearby (± 1 s.e.)",
    )
    axes.set_ylim(bottom=0)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _calibration(panel: CalibrationPanel) -> Figure:
    figure = new_figure(4.3)
    axes = figure.add_subplot()
    widest = max(panel.lines, key=lambda line: max(line.error, default=0.0))
    if len({line.x for line in panel.lines}) == 1 and widest.error:
        # All curves share their x: one band of ± 2 standard errors around the promise serves them all.
        low = [max(0.0, a - 2 * e) for a, e in zip(widest.x, widest.error, strict=True)]
        high = [min(1.0, a + 2 * e) for a, e in zip(widest.x, widest.error, strict=True)]
        axes.fill_between(widest.x, low, high, color=style.GRID, alpha=0.8, lw=0, label="kept, within 2 s.e.")
    axes.plot([0, 1], [0, 1], color=style.MUTED, lw=1, label="promise kept")
    for number, line in enumerate(panel.lines):
        colour, dash, marker = style.SERIES[number % len(style.SERIES)]
        if len({other.x for other in panel.lines}) > 1 and line.error:
            axes.errorbar(line.x, line.y, yerr=line.error, color=colour, ls="none", lw=1, capsize=2)
        axes.plot(line.x, line.y, color=colour, ls=dash, marker=marker, ms=4, lw=1.4, label=line.name)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    per_cent(axes.xaxis)
    per_cent(axes.yaxis)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _curves(panel: CurvesPanel) -> Figure:
    count = len(panel.groups)
    figure = new_figure(0.5 + 2.1 * count)
    for number, (method, lines) in enumerate(panel.groups):
        axes = figure.add_subplot(count, 1, number + 1)
        for place, line in enumerate(lines):
            colour, dash, _ = style.SERIES[place % len(style.SERIES)]
            axes.plot(line.x, line.y, color=colour, ls=dash, lw=1.4, label=line.name)
        axes.set_ylim(*_settled_range(lines))
        axes.set_title(method, loc="left", color=style.INK)
        axes.set_ylabel(panel.axes.y)
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(lines), borderaxespad=0.1)
    figure.axes[-1].set_xlabel(panel.axes.x)
    return figure


def _settled_range(lines: tuple[Line, ...]) -> tuple[float, float]:
    """The range of the values after the first tenth, so that the first steps do not flatten the rest."""
    values = [y for line in lines for y in line.y[len(line.y) // 10 :]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


_DRAWINGS: dict[str, Callable[[Any], Any]] = {
    "band": _band,
    "bars": run_drawings.bars,
    "calibration": _calibration,
    "curves": _curves,
    "dependence": run_drawings.dependence,
    "lines": run_drawings.lines,
    "noise": _noise,
    "traces": run_drawings.traces,
    "truth": run_drawings.truth,
}
