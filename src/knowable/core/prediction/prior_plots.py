"""What ``model.prior_predict(x).plot()`` draws: functions of the prior, and data that would look like them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.prediction.plots import (
    DATA,
    MEAN,
    MOST_OUTPUTS,
    NOISE_BAND,
    Numbers,
    draw_bars,
    drawn,
    one_input,
    outputs_of,
)
from knowable.core.support.checks import check_number
from knowable.core.support.figure import COLOURS
from knowable.errors import InvalidArgument

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction

_LINES = 20  # functions that are drawn
_TAIL = 0.01  # of all drawn values, which the plot leaves out at either end


def plot_prior_numbers(prediction: RegressionPrediction, x: Any, y: Any, ax: Axes | None, level: float) -> Figure:
    """Functions along the one input, with the interval of outcomes; otherwise drawn data beside the observed."""
    level = check_number("level", level, above=0.0, below=1.0)
    along = one_input(x, len(prediction))
    outputs = outputs_of(prediction, y, level, ax)
    if along is not None:
        functions = _columns(prediction.samples)
        plots = [
            partial(_along, x=along, functions=f, output=o, level=level)
            for f, o in zip(functions, outputs, strict=True)
        ]
        return drawn(ax, plots)
    generator = torch.Generator(device=prediction.samples.device).manual_seed(0)
    data = _columns(prediction.components.sample(_each_draw(prediction), generator=generator))
    return drawn(ax, [partial(_outcomes, values=v, observed=o.y) for v, o in zip(data, outputs, strict=True)])


def plot_prior_classes(prediction: ClassPrediction, x: Any, ax: Axes | None) -> Figure:
    """Probabilities along the one input; otherwise those of the first rows, and how sure drawn functions are."""
    along, probs = one_input(x, len(prediction)), prediction.samples.detach().double().cpu().flatten(2)
    single = prediction.probs.shape == prediction.labels.shape  # yes or no
    probs = probs if not single else torch.stack([1 - probs.flatten(1), probs.flatten(1)], 2)
    if along is None or (probs.shape[2] > MOST_OUTPUTS and not single):
        mean = prediction._mix(prediction.samples).detach().double().cpu().flatten(1)
        table = torch.cat([1 - mean, mean], 1) if single else mean
        plots = [lambda axes: draw_bars(axes, table, prediction), lambda axes: _confidence(axes, probs.amax(2))]
        return drawn(ax, plots[:1] if ax is not None else plots, titles=("average", "each function by itself"))
    if ax is not None and not single:
        raise InvalidArgument(f"ax is one plot, and this prediction has {probs.shape[2]} classes. Leave ax out.")
    order = along.argsort()

    def one(axes: Axes, label: int) -> None:
        _lines(axes, along[order], probs[:, order, label])
        axes.plot(along[order], probs[:, order, label].mean(0), color=MEAN, lw=1.6, label="mean")
        axes.set(xlabel="x", ylabel=f"probability of class {label}", ylim=(-0.03, 1.03))

    shown = [1] if single else range(probs.shape[2])
    return drawn(ax, [lambda axes, label=label: one(axes, label) for label in shown], titles=[""] * len(shown))


def _columns(values: Tensor) -> Tensor:
    """Values of draws ``(K, rows, ...)`` by output: ``(outputs, K, rows)``."""
    values = values.detach().double().cpu()
    return values.flatten(2).movedim(2, 0) if values.dim() > 2 else values.unsqueeze(0)


def _each_draw(prediction: RegressionPrediction) -> Tensor:
    """For every value of every draw the number of that draw."""
    shape = prediction.components.mean.shape
    return torch.arange(shape[0], device=prediction.samples.device).view(-1, *(1,) * (len(shape) - 1)).expand(shape)


def _along(axes: Axes, x: Tensor, functions: Tensor, output: Numbers, level: float) -> None:
    """Functions ``(K, rows)`` along the input, in front of the interval of outcomes."""
    order = x.argsort()
    band = {"color": NOISE_BAND, "lw": 0, "label": f"outcomes, {level:.0%}"}
    axes.fill_between(x[order], output.low[order], output.high[order], **band)
    _lines(axes, x[order], functions[:, order])
    axes.plot(x[order], output.mean[order], color=MEAN, lw=1.6, label="mean")
    if output.y is not None:
        axes.plot(x, output.y, ".", color=DATA, ms=4, label="observed")
    axes.set(xlabel="x", ylabel="y")


def _outcomes(axes: Axes, values: Tensor, observed: Tensor | None) -> None:
    _shares(axes, values, observed)
    axes.set(xlabel="y", ylabel="share of rows below")


def _lines(axes: Axes, x: Tensor, values: Tensor) -> None:
    for number, line in enumerate(values[:_LINES]):
        label = None if number else "functions drawn from the prior"
        axes.plot(x, line, color=COLOURS[1], lw=0.8, alpha=0.7, label=label)


def _shares(axes: Axes, values: Tensor, observed: Tensor | None) -> None:
    """Distribution functions of each draw's values over the rows, and of those observed."""
    share = (torch.arange(values.shape[1]) + 1) / values.shape[1]
    for number, line in enumerate(values[:_LINES].sort(1).values):
        label = None if number else "data drawn from the prior"
        axes.plot(line, share, color=COLOURS[1], lw=0.8, alpha=0.7, drawstyle="steps-post", label=label)
    ends = values[:_LINES].flatten().sort().values
    cut = int(_TAIL * len(ends))
    ends = ends[cut : len(ends) - cut]
    if observed is not None:
        known = observed[~observed.isnan()].sort().values
        at = (torch.arange(len(known)) + 1) / max(1, len(known))
        axes.plot(known, at, color=DATA, lw=1.8, drawstyle="steps-post", label="observed")
        ends = torch.cat([ends, known])
    low, high = ends.min().item(), ends.max().item()
    reach = 0.04 * (high - low) or 1.0
    axes.set_xlim(low - reach, high + reach)


def _confidence(axes: Axes, confidence: Tensor) -> None:
    _shares(axes, confidence, None)
    axes.set(xlabel="probability of its most probable class", ylabel="share of rows below", xlim=(0, 1.02))
