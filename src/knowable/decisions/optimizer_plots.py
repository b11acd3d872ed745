"""Pictures of Bayesian optimisation: the surrogate with its acquisition, and the regret."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from knowable.core.support.figure import BAND, COLOURS, INK, MUTED, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from knowable.decisions.optimizer import Optimizer

_GRID = 201


def surrogate_figure(optimizer: Optimizer) -> Figure:
    """Mean and two epistemic standard deviations over the one dimension, what was told, and the acquisition."""
    space = optimizer.space
    rows = space.from_uniform(torch.linspace(0, 1, _GRID, dtype=torch.float64).unsqueeze(1)).unique(dim=0)
    points = [space.decode(row) for row in rows]
    mean, std = optimizer.predict(points)
    seed = optimizer.seed
    with torch.no_grad():
        value = None if optimizer.acquisition == "random" else optimizer._acquisition(seed)(rows.unsqueeze(1))

    def draw(figure: Figure) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        x = [_number(point) for point in points]
        upper.fill_between(x, mean - 2 * std, mean + 2 * std, color=BAND, linewidth=0, label="two standard deviations")
        upper.plot(x, mean, color=COLOURS[0], linewidth=1.6, label="mean of the surrogate")
        upper.plot(
            [_number(point) for point in optimizer.points], optimizer.values, "o", color=INK, markersize=4, label="told"
        )
        lowest = upper.get_ylim()[0]
        for place, point in enumerate(optimizer.pending):
            label = "pending" if place == 0 else None
            upper.plot([_number(point)], [lowest], "^", color=COLOURS[1], clip_on=False, label=label)
        upper.set_ylabel("value")
        upper.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        if value is not None:
            lower.plot(x, value, color=COLOURS[2], linewidth=1.4)
            lower.axvline(x[int(value.argmax())], color=MUTED, linestyle=":", linewidth=1)
        name = "x" if space.names is None else space.names[0]
        lower.set(xlabel=name, ylabel=optimizer.acquisition)

    return new_figure(6.5, 3.8, draw)


def regret_figure(optimizers: Sequence[Optimizer], optimum: float | None) -> Figure:
    """The best feasible value after each evaluation, or its distance from ``optimum``."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for optimizer, colour in zip(optimizers, itertools.cycle(COLOURS), strict=False):
            best = best_so_far(optimizer)
            shown = best if optimum is None else [abs(each - optimum) for each in best]
            name = "random" if optimizer.acquisition == "random" else _name(optimizer)
            axes.step(range(1, len(best) + 1), shown, where="post", color=colour, linewidth=1.6, label=name)
        axes.set(
            xlabel="evaluations", ylabel="best value" if optimum is None else "distance of the best to the optimum"
        )
        if optimum is not None:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.legend()

    return new_figure(5.5, 3.4, draw)


def best_so_far(optimizer: Optimizer) -> list[float]:
    """The best feasible value after each evaluation; NaN before the first."""
    found, best = [], float("nan")
    for value, feasible in zip(optimizer.values, optimizer._feasible().tolist(), strict=True):
        better = value > best if optimizer.maximise else value < best
        if feasible and value == value and (better or best != best):
            best = value
        found.append(best)
    return found


def _name(optimizer: Optimizer) -> str:
    method = "" if optimizer.method is None else f", {type(optimizer.method).__name__}"
    return f"{optimizer.acquisition}{method}"


def _number(point: Any) -> float:
    return float(next(iter(point.values())) if isinstance(point, dict) else point[0])
