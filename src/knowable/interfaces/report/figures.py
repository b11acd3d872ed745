"""Panels drawn with matplotlib, as SVG to be put inside an HTML page.

Nothing global is touched: no pyplot, no backend switch, settings only within a context.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from knowable.errors import MissingExtra, Unsupported
from knowable.interfaces.report import style
from knowable.interfaces.report.panels import BandPanel, CalibrationPanel, CurvesPanel, Line, NoisePanel, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4  # inches; narrow enough to stay readable on a phone


def svg(panel: Panel, *, key: str) -> str:
    """Draw a panel.

    Args:
        panel: What to draw.
        key: A prefix, unique on the page, for the identifiers inside the drawing.

    Returns:
        An ``<svg>`` element with a text alternative.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    draw = _DRAWINGS.get(panel.kind)
    if draw is None:
        raise Unsupported(f"There is no drawing of kind {panel.kind!r}; there are {', '.join(sorted(_DRAWINGS))}.")
    matplotlib = _matplotlib()
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style.RC, "backend": "agg"}):
        return _inline(_markup(draw(panel)), alt=panel.alt, key=key)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra(
            "Figures need matplotlib, which is not installed. Run: pip install knowable[report]"
        ) from None
    return matplotlib


def _new_figure(height: float = 3.5) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _markup(figure: Figure) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return buffer.getvalue()


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
    figure = _new_figure()
    axes = figure.add_subplot()
    per_cent = f"{panel.level:.0%}"
    axes.fill_between(panel.x, panel.low, panel.high, color=style.ALEATORIC_BAND, lw=0, label=f"total, {per_cent}")
    if any(high > low for low, high in zip(panel.epistemic_low, panel.epistemic_high, strict=True)):
        axes.fill_between(
            panel.x,
            panel.epistemic_low,
            panel.epistemic_high,
            color=style.EPISTEMIC_BAND,
            lw=0,
            label=f"epistemic, {per_cent}",
        )
    if panel.truth:
        axes.plot(panel.x, panel.truth, color=style.INK, ls="--", lw=1.2, label="truth")
    axes.plot(panel.x, panel.mean, color=style.MEAN, label="mean")
    if panel.data_x:
        axes.plot(panel.data_x, panel.data_y, ".", color=style.DATA, ms=4, alpha=0.8, label="data")
    return _finish(figure, axes, panel.axes.x, panel.axes.y)


def _noise(panel: NoisePanel) -> Figure:
    figure = _new_figure()
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
    return _finish(figure, axes, panel.axes.x, panel.axes.y)


def _calibration(panel: CalibrationPanel) -> Figure:
    figure = _new_figure(4.3)
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
    _per_cent(axes)
    return _finish(figure, axes, panel.axes.x, panel.axes.y)


def _curves(panel: CurvesPanel) -> Figure:
    count = len(panel.groups)
    figure = _new_figure(0.5 + 2.1 * count)
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


def _finish(figure: Figure, axes: Axes, x: str, y: str) -> Figure:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2 if len(labels) > 3 else len(labels))
    return figure


def _per_cent(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


_DRAWINGS: dict[str, Callable[[Any], Any]] = {
    "band": _band,
    "noise": _noise,
    "calibration": _calibration,
    "curves": _curves,
}
