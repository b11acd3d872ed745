"""Predictions for every pixel as pictures: what was shown, what is true, what is predicted, and how uncertain it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_count, check_type
from knowable.core.support.figure import COLOURS, new_figure
from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE = 1.9  # inches of a picture
_GROUND = "#f2f2f2"  # colour of class 0


def pixel_plot(
    prediction: Prediction,
    x: Any = None,
    y: Any = None,
    *,
    rows: int | Sequence[int] = 0,
    maps: Mapping[str, Any] | None = None,
) -> Figure:
    """Pictures of a prediction for every pixel, a line for each row.

    Of classes: the image, the true and the most probable label of each pixel, and the aleatoric and epistemic part of
    the entropy in nats. Of numbers: the image, the true and the expected value, and the two parts of the standard
    deviation (their squares add up). The epistemic part of a single network, which has none, is left out.

    Args:
        prediction: What ``posterior.predict(x)`` returned, with one outcome for each pixel.
        x: Images that were predicted at, of any size: ``(n, height, width)``, or with 1 or 3 channels in dimension 1.
        y: What was observed.
        rows: Which rows are shown.
        maps: Further pictures by title, ``(n, height, width)``: a mask (booleans), the width of an interval.

    Returns:
        The figure; ``figure.savefig("pixels.png")`` writes it.

    Raises:
        InvalidData: If there is not one outcome for each pixel, or ``x``, ``y`` or ``maps`` have other rows.
        MissingExtra: If matplotlib is not installed.

    Example:
        >>> import knowable as kn
        >>> x, y = kn.datasets.shapes(4)
        >>> net = torch.nn.Conv2d(1, 3, 3, padding=1)
        >>> posterior = kn.MAP(epochs=1).fit(kn.Model(net, kn.Categorical()), (x, y))
        >>> figure = pixel_plot(posterior.predict(x), x, y, rows=[0, 3])
    """
    check_type("prediction", prediction, Prediction, "what posterior.predict(x) returns")
    wanted = [rows] if isinstance(rows, int) else list(rows)
    for row in wanted:
        check_count("rows", row, at_least=0, at_most=len(prediction) - 1)
    panels = _panels(prediction, x, y, wanted, dict(maps or {}))

    def draw(figure: Figure) -> None:
        grid = figure.subplots(len(wanted), len(panels), squeeze=False)
        for place, (title, panel) in enumerate(panels.items()):
            for line, axes in enumerate(grid[:, place]):
                panel.draw(axes, line, figure)
            grid[0, place].set_title(title)

    return new_figure(_SIDE * len(panels), _SIDE * len(wanted) + 0.3, draw)


class _Panel:
    """Pictures of one kind, ``(rows, height, width)`` or ``(rows, height, width, 3)``, in one scale of colours.

    Args:
        values: The pictures.
        colours: Name of a colour map, or a list of colours, one for each class.
        limits: Values at the ends of the scale; None: those of the pictures.
        bar: Whether the scale is shown.
    """

    def __init__(
        self, values: Tensor, colours: str | list[str], limits: tuple[float, float] | None = None, *, bar: bool = False
    ):
        self.values, self.colours, self.bar = values.detach().cpu(), colours, bar
        self.low, self.high = (values.min().item(), values.max().item()) if limits is None else limits

    def draw(self, axes: Axes, line: int, figure: Figure) -> None:
        """The picture of one row."""
        from matplotlib.colors import ListedColormap

        colours = self.colours if isinstance(self.colours, str) else ListedColormap(self.colours)
        picture = self.values[line].double().numpy()
        shown = axes.imshow(picture, cmap=colours, vmin=self.low, vmax=self.high, interpolation="nearest")
        axes.set_axis_off()
        if self.bar:
            figure.colorbar(shown, ax=axes, fraction=0.046, pad=0.03)


def _panels(prediction: Prediction, x: Any, y: Any, rows: list[int], maps: dict[str, Any]) -> dict[str, _Panel]:
    count, panels = len(prediction), {}
    if x is not None:
        panels["image"] = _Panel(_image(to_tensor(x, "x"), count, rows), "gray")
    if isinstance(prediction, ClassPrediction):
        panels |= _of_classes(prediction, y, rows)
    elif isinstance(prediction, RegressionPrediction):
        panels |= _of_numbers(prediction, y, rows)
    else:
        raise InvalidData(f"pixel_plot draws classes or numbers, got a {type(prediction).__name__}. Pass one outcome.")
    for title, given in maps.items():
        values = _map(f"maps[{title!r}]", to_tensor(given, title), count, rows)
        mask = values.dtype == torch.bool
        panels[title] = _Panel(values, [_GROUND, COLOURS[1]], (0, 1)) if mask else _Panel(values, "viridis", bar=True)
    return panels


def _of_classes(prediction: ClassPrediction, y: Any, rows: list[int]) -> dict[str, _Panel]:
    count, panels = len(prediction), {}
    labels = _map("prediction", prediction.labels, count, rows)
    classes = max(2, prediction.probs.shape[1] if prediction.labels.dim() < prediction.probs.dim() else 2)
    palette = [_GROUND, *(COLOURS[place % len(COLOURS)] for place in range(classes - 1))]
    if y is not None:
        panels["truth"] = _Panel(_map("y", to_tensor(y, "y"), count, rows), palette, (0, classes - 1))
    panels["prediction"] = _Panel(labels, palette, (0, classes - 1))
    return panels | _uncertainties(prediction, rows, ", nats")


def _of_numbers(prediction: RegressionPrediction, y: Any, rows: list[int]) -> dict[str, _Panel]:
    count, panels = len(prediction), {}
    mean = _map("prediction", prediction.mean, count, rows)
    truth = None if y is None else _map("y", to_tensor(y, "y"), count, rows)
    known = mean if truth is None else truth
    limits = known.min().item(), known.max().item()
    if truth is not None:
        panels["truth"] = _Panel(truth, "gray", limits)
    panels["mean"] = _Panel(mean, "gray", limits)
    return panels | _uncertainties(prediction, rows, " std")


def _uncertainties(prediction: Prediction, rows: list[int], unit: str) -> dict[str, _Panel]:
    """The aleatoric part, and the epistemic one if there is any: a single network has none."""
    panels = {}
    for kind in ("aleatoric", "epistemic"):
        values = _map("prediction", getattr(prediction, kind), len(prediction), rows).clamp_min(0.0)
        values = values.sqrt() if isinstance(prediction, RegressionPrediction) else values
        if kind == "aleatoric" or len(prediction.samples) > 1:
            panels[kind + unit] = _Panel(values, "viridis", (0.0, max(values.max().item(), 1e-6)), bar=True)
    return panels


def _image(x: Tensor, count: int, rows: list[int]) -> Tensor:
    """Images of one channel, or of three between 0 and 1."""
    if x.dim() == 4 and x.shape[1] == 3 and len(x) == count:
        colours = x[rows].double().movedim(1, -1)
        low, high = colours.min(), colours.max()
        return (colours - low) / (high - low).clamp_min(1e-12)
    return _map("x", x, count, rows)


def _map(name: str, values: Tensor, count: int, rows: list[int]) -> Tensor:
    """``(rows, height, width)``, without dimensions of size 1 beside these."""
    if values.dim() < 3 or len(values) != count:
        raise _unlike_pixels(name, values, count)
    sizes = values.shape[1:]
    if len(sizes) > 2:
        sizes = tuple(size for size in sizes if size != 1)
    if len(sizes) != 2:
        raise _unlike_pixels(name, values, count)
    return values[rows].reshape(len(rows), *sizes)


def _unlike_pixels(name: str, values: Tensor, count: int) -> InvalidData:
    return InvalidData(
        f"{name} must have one number for each pixel, ({count}, height, width), got shape {tuple(values.shape)}. "
        f"pixel_plot is for images; prediction.plot() draws other outcomes."
    )
