"""The sheet that figures are drawn on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4  # inches; narrow enough to stay readable on a phone
POINTS = 72  # to an inch: an SVG file counts in these


def new_figure(height: float = 3.5) -> Figure:
    """A figure whose units on the page are points, as in the SVG that is made of it."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), dpi=POINTS, layout="constrained")


def finish(figure: Figure, axes: Axes, x: str, y: str) -> Figure:
    """Name the axes and put the legend above them."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside upper left", ncols=2 if len(labels) > 3 else len(labels))
    return figure


def per_cent(axis: Any) -> None:
    """Write the numbers of an axis in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0))
