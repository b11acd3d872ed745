"""What can be read off a figure: points with words, for the pointer and the arrow keys.

A :class:`Mark` is in the units of the data; :mod:`knowable.report.drawing` puts it where it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    Panel,
    TruthPanel,
)

_MOST = 400  # of one figure: more are thinned, a page is no database


@dataclass(frozen=True)
class Mark:
    """One point that can be read."""

    plot: int  # which of the figure's pairs of axes it is on, from 0
    x: float
    y: float
    text: str
    row: int | None = None  # line of the file it stands for, if it stands for one


def marks_of(panel: Panel) -> tuple[Mark, ...]:
    """The points of a panel, in the order the arrow keys take; none where there is nothing to read."""
    found = list(_MARKS[panel.kind](panel)) if panel.kind in _MARKS else []
    step = -(-len(found) // _MOST) if panel.kind != "truth" else 1  # every row can be looked up
    return tuple(found[:: max(1, step)])


def _band(panel: BandPanel) -> Iterator[Mark]:
    for x, mean, low, high in zip(panel.x, panel.mean, panel.low, panel.high, strict=True):
        yield Mark(
            0, x, mean, f"{panel.axes.x} {x:.4g}: {mean:.4g}, {panel.level:.0%} between {low:.4g} and {high:.4g}"
        )


def _noise(panel: NoisePanel) -> Iterator[Mark]:
    for x, noise in zip(panel.x, panel.noise, strict=True):
        yield Mark(0, x, noise, f"{panel.axes.x} {x:.4g}: noise {noise:.4g}")


def _calibration(panel: CalibrationPanel) -> Iterator[Mark]:
    for line in panel.lines:
        for place, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
            rows = f" ({line.count[place]} rows)" if line.count else ""
            yield Mark(0, x, y, f"{line.name}: nominal {x:.1%}, observed {y:.1%}{rows}")


def _curves(panel: CurvesPanel) -> Iterator[Mark]:
    for plot, (_, lines) in enumerate(panel.groups):
        for line in lines:
            yield from _along(line, plot, panel.axes.x)


def _lines(panel: LinesPanel) -> Iterator[Mark]:
    for line in panel.lines:
        yield from _along(line, 0, panel.axes.x, percent=panel.percent)


def _along(line: Line, plot: int, name: str, *, percent: bool = False) -> Iterator[Mark]:
    for x, y in zip(line.x, line.y, strict=True):
        yield Mark(plot, x, y, f"{line.name}, {name} {f'{x:.0%}' if percent else f'{x:.4g}'}: {y:.4g}")


def _bars(panel: BarsPanel) -> Iterator[Mark]:
    errors = panel.errors or (None,) * len(panel.values)
    for place, (name, value, error) in enumerate(zip(panel.names, panel.values, errors, strict=True)):
        more = f" ± {error:.2g}" if error is not None else ""
        yield Mark(0, value, float(place), f"{name}: {value:.4g}{more}")


def _forest(panel: ForestPanel) -> Iterator[Mark]:
    for row, (name, value, text) in enumerate(zip(panel.names, panel.values, panel.texts, strict=True)):
        yield Mark(0, value, float(row), f"{name}: {text}")


def _truth(panel: TruthPanel) -> Iterator[Mark]:
    order = sorted(range(len(panel.truth)), key=panel.truth.__getitem__)
    for i in order:
        held = "inside" if panel.inside[i] else "outside"
        text = (
            f"line {panel.rows[i]}: observed {panel.truth[i]:.4g}, predicted {panel.mean[i]:.4g}, {held} "
            f"{panel.low[i]:.4g} to {panel.high[i]:.4g}"
        )
        yield Mark(0, panel.truth[i], panel.mean[i], text, panel.rows[i])


def _dependence(panel: DependencePanel) -> Iterator[Mark]:
    for response in panel.responses:
        for place, x in enumerate(panel.x):
            where = panel.categories[place] if panel.categories else f"{x:.4g}"
            text = (
                f"{panel.axes.x} {where}: {response.name} {response.mean[place]:.4g}, {panel.level:.0%} epistemic "
                f"{response.low[place]:.4g} to {response.high[place]:.4g}; aleatoric {panel.aleatoric[place]:.3g}, "
                f"epistemic {panel.epistemic[place]:.3g} {panel.unit}"
            )
            yield Mark(0, x, response.mean[place], text)


_MARKS: dict[str, Callable[[Any], Iterator[Mark]]] = {
    "band": _band,
    "noise": _noise,
    "calibration": _calibration,
    "curves": _curves,
    "traces": _curves,
    "lines": _lines,
    "bars": _bars,
    "forest": _forest,
    "truth": _truth,
    "dependence": _dependence,
}
