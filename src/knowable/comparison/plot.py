"""A comparison drawn with matplotlib: means on the left, paired differences from the best on the right.

Nothing global is touched: no pyplot, no backend; settings only within a context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from knowable.comparison.drawing import COLOURS, GRID, INK, MUTED
from knowable.comparison.kinds import BY_NAME, FIRST, ScoreKind
from knowable.comparison.statistics import TOLD_APART, Estimate, Place
from knowable.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from knowable.comparison.comparison import Comparison

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
