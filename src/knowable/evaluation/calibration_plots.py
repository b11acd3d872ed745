"""Plots of calibration and rejection, each a function that returns the figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from knowable.core.prediction.plots import draw_reliability
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count
from knowable.core.support.figure import COLOURS, GRID, INK, MUTED, new_figure
from knowable.evaluation.calibration import _confidence, _edges, coverage_curve
from knowable.evaluation.inputs import Array, regression
from knowable.evaluation.pit import pit_histogram
from knowable.evaluation.rejection import accuracy_rejection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 4.6, 3.6
_MARKED = (0.1, 0.3)  # shares of rejection with their accuracy written beside


def reliability_diagram(prediction: Prediction | Array, y: Array, *, bins: int = 10, binning: str = "width") -> Figure:
    """Accuracy against confidence, see :func:`~knowable.evaluation.calibration.reliability_curve`.

    Grey bars are where a calibrated prediction would be, by two standard errors.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        bins: Number of bins of confidence.
        binning: Bins of equal ``"width"`` or equal ``"mass"``.

    Returns:
        The figure.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    bins = check_count("bins", bins)
    confidence, right, counted = _confidence(prediction, y)
    confidence, right = ((each.flatten() if counted is None else each[counted]).cpu() for each in (confidence, right))
    edges = _edges(confidence, bins, binning)
    return _figure(lambda axes: draw_reliability(axes, confidence, right, edges))


def pit_plot(prediction: Prediction, y: Array, *, bins: int = 10) -> Figure:
    """The histogram of the probability integral transform, see :func:`~knowable.evaluation.pit.pit_histogram`.

    It is flat for calibrated predictions, up to the grey band of two standard errors.

    Args:
        prediction: A Prediction over numbers.
        y: Observed numbers.
        bins: Number of bins.

    Returns:
        The figure.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    found = pit_histogram(prediction, y, bins=bins)

    def draw(axes: Axes) -> None:
        flat, error = 1 / bins, 2 * found.standard_error
        axes.axhspan(max(0.0, flat - error), flat + error, color=GRID, lw=0, label="calibrated, ± 2 s.e.")
        left, heights = found.edges[:-1].tolist(), found.share.tolist()
        axes.bar(
            left, heights, 1 / bins, align="edge", color=COLOURS[5], edgecolor="white", alpha=0.85, label="outcomes"
        )
        axes.axhline(flat, color=MUTED, lw=1)
        for edge in (max(0.0, flat - error), flat + error):  # also in front of the bars
            axes.axhline(edge, color=MUTED, lw=0.8, ls=":")
        axes.set(xlabel="predicted probability of a smaller outcome", ylabel="share of outcomes", xlim=(0, 1))

    return _figure(draw)


def coverage_plot(prediction: Prediction, y: Array) -> Figure:
    """Observed against nominal coverage of central intervals, with the band of two standard errors.

    Above the diagonal intervals are too wide, below too narrow.

    Args:
        prediction: A Prediction over numbers.
        y: Observed numbers.

    Returns:
        The figure.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    curve = coverage_curve(prediction, y, torch.arange(1, 40).double() / 40)
    rows = len(regression(prediction, "coverage_plot"))

    def draw(axes: Axes) -> None:
        ends = torch.linspace(0, 1, 101, dtype=torch.float64)
        error = 2 * (ends * (1 - ends) / rows).sqrt()
        low, high = (ends - error).clamp_min(0.0), (ends + error).clamp_max(1.0)
        axes.fill_between(ends, low, high, color=GRID, lw=0, label="calibrated, ± 2 s.e.")
        axes.plot([0, 1], [0, 1], color=MUTED, lw=1)
        axes.plot(curve.levels, curve.coverage, color=COLOURS[0], lw=1.6, label=f"{rows:,} rows")
        axes.set(xlabel="nominal coverage", ylabel="observed coverage", xlim=(0, 1), ylim=(0, 1.01))

    return _figure(draw)


def rejection_plot(prediction: Prediction | Array, y: Array, *, uncertainty: Array | None = None) -> Figure:
    """Accuracy of what is kept against the share that is rejected, see :func:`accuracy_rejection`.

    Args:
        prediction: A Prediction over classes, class probabilities ``(B, C, ...)``, or P(y=1).
        y: Labels from 0, ``(B, ...)``.
        uncertainty: What to reject by; None: total uncertainty.

    Returns:
        The figure.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    curve = accuracy_rejection(prediction, y, uncertainty=uncertainty)
    count = len(curve.rejected)
    places = torch.linspace(0, count - 1, min(count, 500)).round().long()
    best = 1 - (1 - curve.accuracy[0] - curve.rejected[places]).clamp_min(0.0) / (1 - curve.rejected[places])

    def draw(axes: Axes) -> None:
        axes.axhline(curve.accuracy[0].item(), color=MUTED, lw=1, label="at random")
        axes.plot(curve.rejected[places], best, color=GRID, lw=2.5, label="best possible")
        axes.plot(curve.rejected[places], curve.accuracy[places], color=COLOURS[0], lw=1.6, label="by uncertainty")
        for share in _MARKED:
            at = min(count - 1, round(share * count))
            axes.plot(curve.rejected[at], curve.accuracy[at], "o", color=COLOURS[0], ms=4)
            axes.annotate(f"{curve.accuracy[at]:.1%}", (curve.rejected[at], curve.accuracy[at]), xytext=(-4, 7),
                          textcoords="offset points", color=INK, fontsize=8)  # fmt: skip
        shown = curve.accuracy[curve.rejected < 0.95].min().item()
        axes.set(xlabel="share of rows rejected, the most uncertain first", ylabel="accuracy of those kept")
        axes.set(xlim=(0, 1), ylim=(max(0.0, shown - 0.08 * (1.02 - shown)), 1.005))

    return _figure(draw)


def _figure(draw: Callable[[Axes], None]) -> Figure:
    """A figure with one plot and its legend above."""

    def on(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(3, len(labels)))

    return new_figure(_WIDTH, _HEIGHT, on)
