"""The style and palette of all figures. Nothing global is touched: no pyplot, no backend, no settings left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from knowable.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, BAND = "#1a1a1a", "#595959", "#d9d9d9", "#e6eef5"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#333333", "#b3589a")  # Okabe and Ito
RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.facecolor": "white",
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "text.parse_math": False,  # a "$" in a label is a "$"
    "path.simplify": True,
    "agg.path.chunksize": 20_000,
}


@contextmanager
def figure_style(**changes: Any) -> Iterator[None]:
    """Draw in the house style, whatever the user's settings are; ``changes`` are further rc parameters.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("Plots need matplotlib, which is not there. Run: pip install 'knowable[report]'.") from None
    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **RC, "backend": "agg", **changes}
    with matplotlib.rc_context(settings):
        yield


def new_figure(width: float, height: float, draw: Callable[[Figure], None]) -> Figure:
    """A matplotlib figure of ``width`` by ``height`` inches, filled by ``draw``.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    with figure_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
        figure.canvas.draw()
    return figure
