"""What ``prediction.plot()`` draws of images: the prediction of every pixel, and the two parts of its uncertainty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.support.figure import COLOURS, INK, new_figure
from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction

_SHOWN_ROWS = 3


def is_image(values: Tensor) -> bool:
    """Whether each row of ``(batch, ...)`` is a plane of pixels, alone or as the only channel."""
    shape = [size for size in values.shape[1:] if size != 1]
    return len(shape) == 2 and values.dim() in (3, 4)


def plot_maps(prediction: ClassPrediction | RegressionPrediction, y: Any) -> Figure:
    """Maps of the first rows: what is predicted, what was observed if it is known, aleatoric and epistemic part."""
    classes = hasattr(prediction, "labels")
    shown = prediction.labels if classes else prediction.mean  # type: ignore[union-attr]
    planes = {"most probable class" if classes else "mean": _planes(shown)}
    if y is not None:
        observed = to_tensor(y, "y")
        if observed.numel() != shown.numel() or len(observed) != len(shown):
            raise InvalidData(f"y must have the shape {tuple(shown.shape)} of the maps, got {tuple(observed.shape)}.")
        planes["observed"] = _planes(observed.reshape(shown.shape))
    unit = "nats" if classes else "standard deviation"
    for name in ("aleatoric", "epistemic"):
        part = getattr(prediction, name)
        planes[f"{name} ({unit})"] = _planes(part if classes else part.clamp_min(0.0).sqrt())
    count = 2
    if classes:
        count = 2 if prediction.probs.shape == shown.shape else prediction.probs.shape[1]  # type: ignore[union-attr]
    rows = min(_SHOWN_ROWS, len(shown))

    def draw(figure: Figure) -> None:
        from matplotlib.colors import ListedColormap  # where a missing matplotlib was already said

        for column, (title, maps) in enumerate(planes.items()):
            said = column < len(planes) - 2
            colours: Any = "viridis" if said else "magma"
            if said and classes:
                colours = ListedColormap(COLOURS[:count]) if count <= len(COLOURS) else "turbo"
            alike = torch.cat([planes[name] for name in list(planes)[:-2]]) if said else maps  # on the same scale
            finite = alike[alike.isfinite()]
            low, high = finite.min().item() if said else 0.0, finite.max().item()
            if said and classes:
                low, high = -0.5, count - 0.5
            for row in range(rows):
                axes = figure.add_subplot(rows, len(planes), row * len(planes) + column + 1)
                top = max(high, low + 1e-12)
                image = axes.imshow(maps[row].numpy(), cmap=colours, vmin=low, vmax=top, interpolation="nearest")
                axes.set(xticks=[], yticks=[])
                if row == 0:
                    axes.set_title(title, color=INK)
                if row == rows - 1 and not (said and classes):
                    figure.colorbar(image, ax=axes, location="bottom", shrink=0.85, pad=0.03)

    return new_figure(2.5 * len(planes), 2.3 * rows + 0.7, draw)


def _planes(values: Tensor) -> Tensor:
    values = values.detach().cpu()
    kept = [size for size in values.shape[1:] if size != 1]
    return values.reshape(len(values), *kept).double()
