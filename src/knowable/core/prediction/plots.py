"""What ``prediction.plot()`` draws: bands along an input, predictions against outcomes, probabilities, reliability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.network.inputs import Inputs
from knowable.core.prediction.map_plots import is_image, plot_maps
from knowable.core.support.checks import check_number
from knowable.core.support.figure import COLOURS, GRID, INK, MUTED, figure_style, new_figure
from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidArgument, InvalidData, Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction

NOISE_BAND, MODEL_BAND, MEAN, DATA = "#c1e2f7", "#f0a878", "#0b3d62", "#333333"
"""Colours of the two bands, of the mean and of the data, here and in reports."""
MOST_OUTPUTS = 6
"""Panels beside each other."""
_SHOWN_ROWS = 10  # of a classification without labels
_SHOWN_CLASSES = 7  # with a colour of their own
_BINS = 10  # of confidence
_POINTS_BELOW = 400  # rows, up to which a point is solid


@dataclass(frozen=True)
class Numbers:
    """One output of a regression prediction in double precision, each ``(rows,)``."""

    mean: Tensor
    low: Tensor
    high: Tensor
    reach: Tensor  # of the epistemic band, to either side of the mean
    y: Tensor | None


def plot_numbers(prediction: RegressionPrediction, x: Any, y: Any, ax: Axes | None, level: float) -> Figure:
    """A prediction of numbers: along its one input, against what was observed, or sorted."""
    level = check_number("level", level, above=0.0, below=1.0)
    if ax is None and is_image(prediction.mean):
        return plot_maps(prediction, y)
    along = one_input(x, len(prediction))
    outputs = outputs_of(prediction, y, level, ax)

    def one(axes: Axes, output: Numbers) -> None:
        if along is not None:
            _band(axes, along, output, level)
        elif output.y is not None:
            _against(axes, output, level)
        else:
            _sorted(axes, output, level)

    return drawn(ax, [lambda axes, each=each: one(axes, each) for each in outputs])


def plot_classes(prediction: ClassPrediction, y: Any, ax: Axes | None) -> Figure:
    """A prediction of labels: probabilities of the first rows, or a reliability diagram where labels are known."""
    probs = prediction.probs.detach().double().cpu()
    if y is None and ax is None and is_image(prediction.labels):
        return plot_maps(prediction, None)
    if y is None:
        if probs[0].numel() != 1 and probs.dim() != 2:
            raise Unsupported("Rows of several labels have no plot of their own. Pass y for a reliability diagram.")
        table = torch.stack([1 - probs.flatten(), probs.flatten()], 1) if probs[0].numel() == 1 else probs
        return drawn(ax, [lambda axes: draw_bars(axes, table, prediction)])
    labels = prediction.labels.detach().cpu()
    confidence = torch.maximum(probs, 1 - probs) if probs.shape == labels.shape else probs.amax(1)
    observed = to_tensor(y, "y").cpu()
    if observed.numel() != labels.numel() or len(observed) != len(labels):
        raise InvalidData(f"y must have the shape {tuple(labels.shape)} of the labels, got {tuple(observed.shape)}.")
    right, confidence = labels.flatten() == observed.flatten(), confidence.flatten()
    counted = prediction.counted(observed)
    if counted is not None:
        right, confidence = right[counted.flatten()], confidence[counted.flatten()]
    return drawn(ax, [lambda axes: draw_reliability(axes, confidence, right.double())])


def binned(confidence: Tensor, right: Tensor, edges: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The edges of bins of confidence; in each the mean confidence, the share that is right and the number of both.

    The means of empty bins are NaN.
    """
    bins = len(edges) - 1
    index = torch.bucketize(confidence, edges[1:-1])  # (lower, upper]
    count = torch.bincount(index, minlength=bins)
    mean_confidence = torch.bincount(index, confidence, minlength=bins) / count
    mean_accuracy = torch.bincount(index, right, minlength=bins) / count
    return edges, mean_confidence, mean_accuracy, count


# --- what is drawn ---------------------------------------------------------------------------------------------------


def one_input(x: Any, rows: int) -> Tensor | None:
    """The input along which to draw; None where there is none, or several."""
    if x is None or isinstance(x, Inputs):
        return None
    found = to_tensor(x, "x").detach().double().cpu()
    if found.dim() == 0 or len(found) != rows:
        raise InvalidData(f"x must have {rows} rows, one for each prediction; got shape {tuple(found.shape)}.")
    return found.flatten() if found.numel() == rows else None


def outputs_of(prediction: RegressionPrediction, y: Any, level: float, ax: Axes | None) -> list[Numbers]:
    """What is drawn of each output."""
    count = prediction.mean[0].numel()
    if count > MOST_OUTPUTS:
        raise Unsupported(f"A plot shows at most {MOST_OUTPUTS} outputs, and this prediction has {count}.")
    if ax is not None and count > 1:
        raise InvalidArgument(f"ax is one plot, and this prediction has {count} outputs. Leave ax out.")

    def columns(value: Tensor) -> Tensor:
        return value.detach().double().cpu().reshape(len(prediction), -1).T

    reach = NormalDist().inv_cdf((1 + level) / 2) * columns(prediction.epistemic).clamp_min(0.0).sqrt()
    low, high = (columns(side) for side in prediction.interval(level))
    mean = columns(prediction.mean)
    observed = [None] * len(mean) if y is None else columns(prediction._aligned(y))
    return [Numbers(*each) for each in zip(mean, low, high, reach, observed, strict=True)]


def drawn(ax: Axes | None, plots: list[Callable[[Any], None]], titles: Sequence[str] | None = None) -> Figure:
    """The plots beside each other in a figure of their own, or the only one in the user's axes.

    Several have the titles "output 0", "output 1" and so on, if no others are given.
    """
    if ax is not None:
        with figure_style():
            plots[0](ax)
        return ax.figure  # type: ignore[return-value]

    def draw(figure: Figure) -> None:
        for number, plot in enumerate(plots):
            axes = figure.add_subplot(1, len(plots), number + 1)
            plot(axes)
            if len(plots) > 1:
                axes.set_title(titles[number] if titles else f"output {number}", loc="left", color=INK)
            handles, labels = axes.get_legend_handles_labels()
            if number == 0 and labels:
                columns = len(labels) if len(plots) > 1 else 2 if len(labels) == 4 else min(3, len(labels))
                figure.legend(handles, labels, loc="outside upper left", ncols=columns)

    return new_figure(5.8 if len(plots) == 1 else 3.6 * len(plots), 3.9, draw)


def _band(axes: Axes, x: Tensor, output: Numbers, level: float) -> None:
    order = x.argsort()
    at, mean, reach = x[order], output.mean[order], output.reach[order]
    low, high = output.low[order], output.high[order]
    axes.fill_between(at, low, high, color=NOISE_BAND, lw=0, label=f"total, {level:.0%} (noise and model)")
    if reach.any():
        axes.fill_between(at, mean - reach, mean + reach, color=MODEL_BAND, lw=0, label=f"epistemic, {level:.0%}")
    axes.plot(at, mean, color=MEAN, lw=1.6, label="mean")
    if output.y is not None:
        axes.plot(x, output.y, ".", color=DATA, ms=4, alpha=_alpha(len(x)), label="observed")
    axes.set(xlabel="x", ylabel="y")


def _against(axes: Axes, output: Numbers, level: float) -> None:
    assert output.y is not None
    known = ~output.y.isnan()
    if not known.all():
        parts = (output.mean, output.low, output.high, output.reach, output.y)
        output = Numbers(*(each[known] for each in parts))
        assert output.y is not None
    inside = (output.y >= output.low) & (output.y <= output.high)
    ends = [
        min(output.y.min().item(), output.low.min().item()),
        max(output.y.max().item(), output.high.max().item()),
    ]
    axes.plot(ends, ends, color=MUTED, lw=1, label="perfect prediction")
    share = inside.double().mean().item()
    for chosen, colour, marker, label in (
        (inside, COLOURS[0], "o", f"inside its {level:.0%} interval: {share:.0%}"),
        (~inside, COLOURS[1], "D", f"outside: {1 - share:.0%}"),
    ):
        if chosen.any():
            at = output.y[chosen]
            axes.vlines(at, output.low[chosen], output.high[chosen], color=colour, alpha=0.35, lw=1)
            axes.plot(at, output.mean[chosen], marker, color=colour, ms=4, alpha=_alpha(len(at)), label=label)
    axes.set(xlabel="observed", ylabel=f"predicted, with {level:.0%} intervals")


def _sorted(axes: Axes, output: Numbers, level: float) -> None:
    order = output.mean.argsort()
    mean, place = output.mean[order], torch.arange(len(order))
    axes.vlines(place, output.low[order], output.high[order], color=COLOURS[5], lw=1, label=f"total, {level:.0%}")
    reach = output.reach[order]
    if reach.any():
        axes.vlines(place, mean - reach, mean + reach, color=COLOURS[1], lw=1.6, label=f"epistemic, {level:.0%}")
    axes.plot(place, mean, ".", color=MEAN, ms=4, label="mean")
    axes.set(xlabel="rows, sorted by predicted mean", ylabel="predicted y")


def draw_bars(axes: Axes, probs: Tensor, prediction: ClassPrediction) -> None:
    """Probabilities of the first rows."""
    rows, classes = min(_SHOWN_ROWS, len(probs)), probs.shape[1]
    kept = list(range(classes))
    if classes > _SHOWN_CLASSES + 1:
        kept = probs[:rows].sum(0).topk(_SHOWN_CLASSES).indices.sort().values.tolist()
    parts = [(f"class {label}", probs[:rows, label], COLOURS[k % len(COLOURS)]) for k, label in enumerate(kept)]
    if len(kept) < classes:
        parts.append((f"{classes - len(kept)} others", 1 - probs[:rows][:, kept].sum(1), GRID))
    left = torch.zeros(rows, dtype=probs.dtype)
    for name, width, colour in parts:
        axes.barh(range(rows), width, left=left, color=colour, height=0.72, label=name, edgecolor="white", lw=0.5)
        left = left + width
    total, epistemic = (each.detach().flatten().tolist() for each in (prediction.total, prediction.epistemic))
    for row in range(rows):
        axes.text(1.02, row, f"{total[row]:.2f} ({epistemic[row]:.2f})", va="center", color=MUTED, fontsize=8)
    axes.text(1.02, -0.95, "entropy (epistemic)", va="center", color=MUTED, fontsize=8)
    axes.set(xlim=(0, 1), xlabel="probability", ylabel="row", yticks=list(range(rows)))
    axes.set_ylim(rows - 0.5, -0.6)


def draw_reliability(axes: Axes, confidence: Tensor, right: Tensor, edges: Tensor | None = None) -> None:
    """A reliability diagram in the bins with these edges, ten of equal width if None are given."""
    edges = torch.linspace(0.0, 1.0, _BINS + 1, dtype=torch.float64) if edges is None else edges
    _, middle, accuracy, count = binned(confidence, right, edges)
    there = count > 0
    middle, accuracy, count = middle[there], accuracy[there], count[there]
    error = 2.0 * (middle * (1 - middle) / count).clamp_min(0.0).sqrt()  # of the accuracy, if confidence is right
    axes.plot([0, 1], [0, 1], color=MUTED, lw=1, label="calibrated")
    low, high = (middle - error).clamp_min(0.0), (middle + error).clamp_max(1.0)
    axes.vlines(middle, low, high, color=GRID, lw=7, label="calibrated, ± 2 s.e.")
    sizes = [max(10.0, 200.0 * each / len(right)) for each in count.tolist()]
    axes.scatter(middle, accuracy, s=sizes, color=COLOURS[0], zorder=3, label="rows (area: how many)")
    axes.plot(middle, accuracy, color=COLOURS[0], lw=1, alpha=0.6)
    axes.set(xlabel="confidence: probability of the predicted label", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.set_xlim(min(0.45, confidence.min().item() - 0.03), 1.03)


def _alpha(rows: int) -> float:
    return 0.9 if rows <= _POINTS_BELOW else 0.4
