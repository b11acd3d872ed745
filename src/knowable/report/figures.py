"""How each kind of panel is drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from knowable.core.prediction.plots import DATA, MEAN, MODEL_BAND, NOISE_BAND
from knowable.core.support.figure import COLOURS, GRID, INK, MUTED
from knowable.report.panels import (
    BandPanel,
    BarsPanel,
    CalibrationPanel,
    CurvesPanel,
    DependencePanel,
    ForestPanel,
    Line,
    LinesPanel,
    NoisePanel,
    TracesPanel,
    TruthPanel,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4  # inches; narrow enough to stay readable on a phone
POINTS = 72  # to an inch: an SVG file counts in these
EPISTEMIC = COLOURS[1]  # vermilion: uncertainty of the model
SERIES = tuple(
    # told apart without colour too
    zip((*COLOURS[:5], DATA), ("-", "--", "-.", ":", "-", "--"), ("o", "s", "^", "D", "v", "P"), strict=True)
)
VERDICTS = {  # colour and marker
    "best": ("#0b4f7d", "D"),
    "tied": ("#0b4f7d", "o"),
    "worse": ("#8c3b00", "s"),
    "unclear": (MUTED, "v"),
}
_LONGEST_NAME = 24  # characters of a name on an axis
_LEGEND_LINE = 42  # characters of a legend that fit beside each other


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


def _band(panel: BandPanel) -> Figure:
    figure = new_figure()
    axes = figure.add_subplot()
    share = f"{panel.level:.0%}"
    axes.fill_between(panel.x, panel.low, panel.high, color=NOISE_BAND, lw=0, label=f"total, {share}")
    if any(high > low for low, high in zip(panel.epistemic_low, panel.epistemic_high, strict=True)):
        axes.fill_between(
            panel.x, panel.epistemic_low, panel.epistemic_high, color=MODEL_BAND, lw=0, label=f"epistemic, {share}"
        )
    if panel.truth:
        axes.plot(panel.x, panel.truth, color=INK, ls="--", lw=1.2, label="truth")
    axes.plot(panel.x, panel.mean, color=MEAN, label="mean")
    if panel.data_x:
        axes.plot(panel.data_x, panel.data_y, ".", color=DATA, ms=4, alpha=0.8, label="data")
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _noise(panel: NoisePanel) -> Figure:
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot(panel.x, panel.noise, color=COLOURS[0], label="predicted noise sd")
    axes.errorbar(
        panel.local_x,
        panel.local_std,
        yerr=panel.local_error,
        fmt="o",
        color=DATA,
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
        axes.fill_between(widest.x, low, high, color=GRID, alpha=0.8, lw=0, label="calibrated, ± 2 s.e.")
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1, label="calibrated")
    for number, line in enumerate(panel.lines):
        colour, dash, marker = SERIES[number % len(SERIES)]
        if len({other.x for other in panel.lines}) > 1 and line.error:
            axes.errorbar(line.x, line.y, yerr=line.error, color=colour, ls="none", lw=1, capsize=2)
        axes.plot(line.x, line.y, color=colour, ls=dash, marker=marker, ms=4, lw=1.4, label=line.name)
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    per_cent(axes.xaxis)
    per_cent(axes.yaxis)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _curves(panel: CurvesPanel) -> Figure:
    """A small plot for each group; traces are thin lines, one for each chain, without a legend."""
    traces, count = isinstance(panel, TracesPanel), len(panel.groups)
    figure = new_figure(0.5 + (1.9 if traces else 2.1) * count)
    for number, (name, lines) in enumerate(panel.groups):
        axes = figure.add_subplot(count, 1, number + 1)
        for place, line in enumerate(lines):
            colour, dash, _ = SERIES[place % len(SERIES)]
            dash, width = ("-", 0.6) if traces else (dash, 1.4)
            axes.plot(line.x, line.y, color=colour, ls=dash, lw=width, label=line.name)
        axes.set_title(name, loc="left", color=INK)
        axes.set_ylabel(panel.axes.y)
        if not traces:
            axes.set_ylim(*_settled_range(lines))
            axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(lines), borderaxespad=0.1)
    figure.axes[-1].set_xlabel(panel.axes.x)
    return figure


def _settled_range(lines: tuple[Line, ...]) -> tuple[float, float]:
    """The range of the values after the first tenth, so that the first steps do not flatten the rest."""
    values = [y for line in lines for y in line.y[len(line.y) // 10 :]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.05 * (high - low) or 1.0
    return low - margin, high + margin


def _truth(panel: TruthPanel) -> Figure:
    """Predictions against what was observed: an upright interval for each row, misses marked in colour and shape."""
    figure = new_figure(4.3)
    axes = figure.add_subplot()
    ends = [min(*panel.truth, *panel.low), max(*panel.truth, *panel.high)]
    axes.plot(ends, ends, color=MUTED, lw=1, label="perfect prediction")
    crowd = 0.9 if len(panel.truth) <= 60 else 0.5
    for held, colour, marker, label in (
        (True, COLOURS[0], "o", f"inside its {panel.level:.0%} interval"),
        (False, EPISTEMIC, "D", "outside"),
    ):
        chosen = [i for i, inside in enumerate(panel.inside) if inside is held]
        if not chosen:
            continue
        x, y = [panel.truth[i] for i in chosen], [panel.mean[i] for i in chosen]
        axes.vlines(x, [panel.low[i] for i in chosen], [panel.high[i] for i in chosen], color=colour, alpha=0.35, lw=1)
        axes.plot(x, y, marker, color=colour, ms=4, alpha=crowd, label=label)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _dependence(panel: DependencePanel) -> Figure:
    """The mean along one input with its bands, and beneath it the two uncertainties."""
    figure = new_figure(5.0)
    above, beneath = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    (_categories if panel.categories else _numbers)(panel, above, beneath)
    beneath.set_ylim(bottom=0)
    above.set_ylabel(panel.axes.y)
    beneath.set_ylabel(panel.unit)
    beneath.set_xlabel(panel.axes.x)
    for axes in (above, beneath):
        _, labels = axes.get_legend_handles_labels()
        columns = len(labels) if sum(map(len, labels)) <= _LEGEND_LINE else 1
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.1)
    return figure


def _numbers(panel: DependencePanel, above: Axes, beneath: Axes) -> None:
    if panel.low:
        label = f"total, {panel.level:.0%}"
        above.fill_between(panel.x, panel.low, panel.high, color=NOISE_BAND, lw=0, label=label)
    for number, response in enumerate(panel.responses):
        colour, dash, _ = SERIES[number % len(SERIES)] if not panel.low else (MEAN, "-", "")
        band = MODEL_BAND if panel.low else colour
        label = f"epistemic, {panel.level:.0%}" if panel.low else None
        above.fill_between(
            panel.x, response.low, response.high, color=band, alpha=None if panel.low else 0.2, lw=0, label=label
        )
        above.plot(panel.x, response.mean, color=colour, ls=dash, label=_short(response.name))
    beneath.plot(panel.x, panel.aleatoric, color=COLOURS[0], label="aleatoric")
    beneath.plot(panel.x, panel.epistemic, color=EPISTEMIC, ls="--", label="epistemic")
    if panel.seen:  # where the data are
        height = beneath.get_xaxis_transform()
        beneath.plot(panel.seen, [0.02] * len(panel.seen), "|", color=DATA, ms=6, alpha=0.5, transform=height)


def _categories(panel: DependencePanel, above: Axes, beneath: Axes) -> None:
    count = len(panel.responses)
    for number, response in enumerate(panel.responses):
        colour, _, marker = SERIES[number % len(SERIES)]
        x = [place + 0.12 * (number - (count - 1) / 2) for place in panel.x]
        if panel.low:
            above.vlines(x, panel.low, panel.high, color=NOISE_BAND, lw=7, label=f"total, {panel.level:.0%}")
            above.vlines(x, response.low, response.high, color=MODEL_BAND, lw=4, label="epistemic")
        else:
            above.vlines(x, response.low, response.high, color=colour, lw=3, alpha=0.4)
        above.plot(x, response.mean, marker, color=MEAN if panel.low else colour, label=_short(response.name))
    beneath.bar([x - 0.18 for x in panel.x], panel.aleatoric, 0.34, color=COLOURS[0], label="aleatoric")
    beneath.bar([x + 0.18 for x in panel.x], panel.epistemic, 0.34, color=EPISTEMIC, hatch="//", label="epistemic")
    beneath.set_xticks(list(panel.x), [_short(name) for name in panel.categories], rotation=30, ha="right")


def _bars(panel: BarsPanel) -> Figure:
    """Horizontal bars with their standard errors, the first one on top."""
    figure = new_figure(0.9 + 0.32 * len(panel.names))
    axes = figure.add_subplot()
    places = list(range(len(panel.names)))
    axes.barh(places, panel.values, xerr=panel.errors or None, color=COLOURS[0], ecolor=INK, capsize=2, height=0.62)
    axes.set_yticks(places, [_short(name) for name in panel.names])
    axes.invert_yaxis()
    axes.axvline(0, color=MUTED, lw=1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(panel.axes.x)
    return figure


def _lines(panel: LinesPanel) -> Figure:
    """Curves with a band of one standard error."""
    figure = new_figure()
    axes = figure.add_subplot()
    for number, line in enumerate(panel.lines):
        colour, dash, _ = SERIES[number % len(SERIES)]
        if line.error:
            low = [y - e for y, e in zip(line.y, line.error, strict=True)]
            high = [y + e for y, e in zip(line.y, line.error, strict=True)]
            axes.fill_between(line.x, low, high, color=colour, alpha=0.2, lw=0)
        axes.plot(line.x, line.y, color=colour, ls=dash, label=line.name)
    if panel.percent:
        per_cent(axes.xaxis)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def _forest(panel: ForestPanel) -> Figure:
    figure = new_figure(1.0 + 0.34 * len(panel.names))
    draw_forest(figure.add_subplot(), panel)
    return figure


def draw_forest(axes: Axes, panel: ForestPanel) -> None:
    """A marker with its error bar for each name, the first on top; values that are not finite have a name only."""
    for row, (value, half, verdict) in enumerate(zip(panel.values, panel.half_widths, panel.verdicts, strict=True)):
        if math.isfinite(value):
            colour, marker = VERDICTS[verdict]
            axes.errorbar(value, row, xerr=half, fmt=marker, color=colour, ms=5.5, lw=1.6, capsize=3)
    if panel.zero:
        axes.axvline(0.0, color=MUTED, lw=1.0)
    axes.set_yticks(range(len(panel.names)), [_short(name) for name in panel.names])
    axes.set_ylim(len(panel.names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, lw=0.7)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.margins(x=0.08)
    axes.set_xlabel(panel.axes.x)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"


FIGURES: dict[str, Callable[[Any], Any]] = {
    "band": _band,
    "bars": _bars,
    "calibration": _calibration,
    "curves": _curves,
    "dependence": _dependence,
    "forest": _forest,
    "lines": _lines,
    "noise": _noise,
    "traces": _curves,
    "truth": _truth,
}
"""The drawing of each kind of panel."""
