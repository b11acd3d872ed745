"""Drawings of the figures that a run's report adds: rows against truth, inputs one by one, chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowable.report import style
from knowable.report.canvas import finish, new_figure, per_cent
from knowable.report.panels import BarsPanel, DependencePanel, LinesPanel, TracesPanel, TruthPanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONGEST_NAME = 24  # characters of a name on an axis
_LEGEND_LINE = 42  # characters of a legend that fit beside each other


def truth(panel: TruthPanel) -> Figure:
    """Predictions against what was observed: an upright interval for each row, misses marked in colour and shape."""
    figure = new_figure(4.3)
    axes = figure.add_subplot()
    ends = [min(*panel.truth, *panel.low), max(*panel.truth, *panel.high)]
    axes.plot(ends, ends, color=style.MUTED, lw=1, label="right")
    crowd = 0.9 if len(panel.truth) <= 60 else 0.5
    for held, colour, marker, label in (
        (True, "#0072b2", "o", f"inside its {panel.level:.0%} interval"),
        (False, style.EPISTEMIC, "D", "outside"),
    ):
        chosen = [i for i, inside in enumerate(panel.inside) if inside is held]
        if not chosen:
            continue
        x, y = [panel.truth[i] for i in chosen], [panel.mean[i] for i in chosen]
        axes.vlines(x, [panel.low[i] for i in chosen], [panel.high[i] for i in chosen], color=colour, alpha=0.35, lw=1)
        axes.plot(x, y, marker, color=colour, ms=4, alpha=crowd, label=label)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def dependence(panel: DependencePanel) -> Figure:
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
        above.fill_between(panel.x, panel.low, panel.high, color=style.ALEATORIC_BAND, lw=0, label=label)
    for number, response in enumerate(panel.responses):
        colour, dash, _ = style.SERIES[number % len(style.SERIES)] if not panel.low else (style.MEAN, "-", "")
        band = style.EPISTEMIC_BAND if panel.low else colour
        label = f"epistemic, {panel.level:.0%}" if panel.low else None
        above.fill_between(
            panel.x, response.low, response.high, color=band, alpha=None if panel.low else 0.2, lw=0, label=label
        )
        above.plot(panel.x, response.mean, color=colour, ls=dash, label=_short(response.name))
    beneath.plot(panel.x, panel.aleatoric, color="#0072b2", label="aleatoric")
    beneath.plot(panel.x, panel.epistemic, color=style.EPISTEMIC, ls="--", label="epistemic")
    if panel.seen:  # where the data are
        height = beneath.get_xaxis_transform()
        beneath.plot(panel.seen, [0.02] * len(panel.seen), "|", color=style.DATA, ms=6, alpha=0.5, transform=height)


def _categories(panel: DependencePanel, above: Axes, beneath: Axes) -> None:
    count = len(panel.responses)
    for number, response in enumerate(panel.responses):
        colour, _, marker = style.SERIES[number % len(style.SERIES)]
        x = [place + 0.12 * (number - (count - 1) / 2) for place in panel.x]
        if panel.low:
            above.vlines(x, panel.low, panel.high, color=style.ALEATORIC_BAND, lw=7, label=f"total, {panel.level:.0%}")
            above.vlines(x, response.low, response.high, color=style.EPISTEMIC_BAND, lw=4, label="epistemic")
        else:
            above.vlines(x, response.low, response.high, color=colour, lw=3, alpha=0.4)
        above.plot(x, response.mean, marker, color=style.MEAN if panel.low else colour, label=_short(response.name))
    beneath.bar([x - 0.18 for x in panel.x], panel.aleatoric, 0.34, color="#0072b2", label="aleatoric")
    beneath.bar(
        [x + 0.18 for x in panel.x], panel.epistemic, 0.34, color=style.EPISTEMIC, hatch="//", label="epistemic"
    )
    beneath.set_xticks(list(panel.x), [_short(name) for name in panel.categories], rotation=30, ha="right")


def bars(panel: BarsPanel) -> Figure:
    """Horizontal bars with their standard errors, the first one on top."""
    figure = new_figure(0.9 + 0.32 * len(panel.names))
    axes = figure.add_subplot()
    places = list(range(len(panel.names)))
    axes.barh(
        places, panel.values, xerr=panel.errors or None, color="#0072b2", ecolor=style.INK, capsize=2, height=0.62
    )
    axes.set_yticks(places, [_short(name) for name in panel.names])
    axes.invert_yaxis()
    axes.axvline(0, color=style.MUTED, lw=1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(panel.axes.x)
    return figure


def lines(panel: LinesPanel) -> Figure:
    """Curves with a band of one standard error."""
    figure = new_figure()
    axes = figure.add_subplot()
    for number, line in enumerate(panel.lines):
        colour, dash, _ = style.SERIES[number % len(style.SERIES)]
        if line.error:
            low = [y - e for y, e in zip(line.y, line.error, strict=True)]
            high = [y + e for y, e in zip(line.y, line.error, strict=True)]
            axes.fill_between(line.x, low, high, color=colour, alpha=0.2, lw=0)
        axes.plot(line.x, line.y, color=colour, ls=dash, label=line.name)
    if panel.percent:
        per_cent(axes.xaxis)
    return finish(figure, axes, panel.axes.x, panel.axes.y)


def traces(panel: TracesPanel) -> Figure:
    """Thin lines, one for each chain."""
    count = len(panel.groups)
    figure = new_figure(0.5 + 1.9 * count)
    for number, (quantity, chains) in enumerate(panel.groups):
        axes = figure.add_subplot(count, 1, number + 1)
        for place, line in enumerate(chains):
            axes.plot(line.x, line.y, color=style.SERIES[place % len(style.SERIES)][0], lw=0.6, label=line.name)
        axes.set_title(quantity, loc="left", color=style.INK)
        axes.set_ylabel(panel.axes.y)
    figure.axes[-1].set_xlabel(panel.axes.x)
    return figure


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…"
