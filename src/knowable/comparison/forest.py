"""Marks with error bars as an SVG element, for pages: no library needed, nothing to load.

Every mark says its numbers when the pointer rests on it, and the drawing as a whole has a text alternative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from knowable.comparison.comparison import TOLD_APART, Estimate, Place
from knowable.comparison.scores import BY_NAME, FIRST, ScoreKind
from knowable.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from knowable.comparison.comparison import Comparison


_WIDTH, _ROW, _TOP, _BOTTOM, _SIDE = 420.0, 34.0, 8.0, 46.0, 12.0
INK, MUTED, GRID = "#1a1a1a", "#595959", "#d9d9d9"
COLOURS = {"best": "#0b4f7d", "tied": "#0b4f7d", "worse": "#8c3b00", "unclear": "#595959"}


@dataclass(frozen=True)
class Mark:
    """One line of the drawing.

    Attributes:
        name: What it is of.
        value: Where it stands.
        half: Half the length of its error bar; 0 draws none.
        text: Its numbers in words.
        kind: ``"best"``, ``"tied"``, ``"worse"`` or ``"unclear"``: form and colour.
    """

    name: str
    value: float
    half: float
    text: str
    kind: str


def forest(marks: Sequence[Mark], *, axis: str, alt: str, zero: bool = False) -> str:
    """Draw marks one below the other.

    Args:
        marks: From top to bottom; those whose value is not finite get their name and text alone.
        axis: Name of the axis.
        alt: The drawing in words.
        zero: Draw a line at zero, which is then inside.

    Returns:
        An ``<svg>`` element.
    """
    ticks = nice_ticks(*_range(marks, zero))
    low, high = ticks[0], ticks[-1]
    height = _TOP + _ROW * len(marks) + _BOTTOM
    base = height - _BOTTOM

    def place(value: float) -> float:
        return _SIDE + (value - low) / (high - low) * (_WIDTH - 2 * _SIDE)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{escape(alt)}" font-size="11.5" fill="{INK}">'
    ]
    for tick in ticks:
        x = place(tick)
        colour = MUTED if zero and tick == 0 else GRID
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP:g}" x2="{x:.1f}" y2="{base:g}" stroke="{colour}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{base + 15:g}" text-anchor="middle">{escape(tick_text(tick, ticks))}</text>'
        )
    parts += [_drawn(mark, _TOP + _ROW * row, place) for row, mark in enumerate(marks)]
    parts.append(f'<text x="{_WIDTH / 2:g}" y="{height - 10:g}" text-anchor="middle">{escape(axis)}</text></svg>')
    return "".join(parts)


def _drawn(mark: Mark, top: float, place: Callable[[float], float]) -> str:
    """A mark below its name."""
    known = math.isfinite(mark.value)
    label = mark.name if known else f"{mark.name}: {mark.text}"
    parts = [f"<g><title>{escape(mark.name)}: {escape(mark.text)}</title>"]
    parts.append(f'<text x="{_SIDE:g}" y="{top + 12:g}">{escape(label)}</text>')
    if known:
        x, y, colour = place(mark.value), top + 23, COLOURS[mark.kind]
        if mark.half > 0:
            left, right = place(mark.value - mark.half), place(mark.value + mark.half)
            parts.append(
                f'<path d="M{left:.1f} {y - 4:g}v8M{right:.1f} {y - 4:g}v8M{left:.1f} {y:g}H{right:.1f}" '
                f'stroke="{colour}" stroke-width="1.8" fill="none"/>'
            )
        parts.append(_shape(mark.kind, x, y, colour))
    return "".join(parts) + "</g>"


def _shape(kind: str, x: float, y: float, colour: str) -> str:
    """A diamond for the best, a disc for ties, a square for others: told apart without colour."""
    if kind == "best":
        return f'<path d="M{x:.1f} {y - 6:g}l6 6-6 6-6-6z" fill="{colour}"/>'
    if kind == "tied":
        return f'<circle cx="{x:.1f}" cy="{y:g}" r="4.5" fill="{colour}"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:g}" width="8" height="8" fill="{colour}"/>'


def _range(marks: Sequence[Mark], zero: bool) -> tuple[float, float]:
    ends = [mark.value + side * mark.half for mark in marks if math.isfinite(mark.value) for side in (-1, 1)]
    ends += [0.0] if zero or not ends else []
    return min(ends), max(ends)


def nice_ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """Round numbers, evenly spaced, the first at or below ``low`` and the last at or above ``high``.

    >>> nice_ticks(0.13, 0.92)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = [factor * power for factor in (1, 2, 5, 10, 20)]
    ends = [(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)) for step in steps]
    step, (first, last) = next(pair for pair in zip(steps, ends, strict=True) if pair[1][1] - pair[1][0] < most)
    return [float(f"{number * step:.14g}") for number in range(first, last + 1)]


def tick_text(tick: float, ticks: Sequence[float]) -> str:
    """A tick with the digits that its distance from the next one needs."""
    step = ticks[1] - ticks[0]
    if abs(tick) >= 1e5 or (0 < step < 1e-5):
        return f"{tick:.3g}"
    return f"{tick:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"


# --- A comparison drawn with matplotlib: means on the left, paired differences from the best on the right ------------
#
# Nothing global is touched: no pyplot, no backend; settings only within a context.

MARKERS = {"best": "D", "tied": "o", "worse": "s", "unclear": "v"}  # told apart without colour too
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "white",
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "text.parse_math": False,  # a "$" in a name is a "$"
}


def plot(comparison: Comparison, score: str = FIRST) -> Figure:
    """Means with one standard error, and paired differences with two; see :meth:`Comparison.plot`."""
    places = comparison.ranking(score)
    kind = BY_NAME[score]
    matplotlib = _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_RC, "backend": "agg"}):
        figure = Figure(figsize=(8.8, 1.3 + 0.36 * len(places)), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, sharey=True)
        _marks(left, places, [place.score for place in places], errors=1.0)
        _marks(right, places, [place.difference for place in places], errors=TOLD_APART)
        right.axvline(0.0, color=MUTED, lw=1.0)
        left.set_yticks(range(len(places)), [place.method for place in places])
        left.set_ylim(len(places) - 0.5, -0.5)  # the best on top
        left.set_xlabel(_axis(kind))
        left.set_title("mean over folds ± 1 s.e.", loc="left", fontsize=9.5)
        right.set_xlabel(f"{kind.label} less that of {places[0].method}")
        right.set_title(f"paired difference ± {TOLD_APART:g} s.e.", loc="left", fontsize=9.5)
        figure.canvas.draw()
    return figure


def _axis(kind: ScoreKind) -> str:
    return f"{kind.label} ({kind.direction})"


def _marks(axes: Axes, places: Sequence[Place], values: Sequence[Estimate], *, errors: float) -> None:
    """A mark for each method, with a bar of so many standard errors; what is infinite is left out."""
    for row, (place, value) in enumerate(zip(places, values, strict=True)):
        if not math.isfinite(value.mean):
            continue
        half = errors * value.standard_error if math.isfinite(value.standard_error) else 0.0
        axes.errorbar(
            value.mean, row, xerr=half, fmt=MARKERS[place.verdict], color=COLOURS[place.verdict], ms=5.5, lw=1.6,
            capsize=3,
        )  # fmt: skip
    axes.grid(axis="x", color=GRID, lw=0.7)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("Plots need matplotlib, which is not installed. Run: pip install knowable[report]") from None
    return matplotlib
