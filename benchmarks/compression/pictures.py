"""Pictures of networks that become sparse: the filters of a first layer, laid out as filters, epoch by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.compression.sparsity import THRESHOLD

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LIMIT = 8.0
"""Log alphas are shown up to this distance from the threshold, at which the colour changes."""
_MOST_FRAMES = 40


def draw_filters(frames: Tensor, path: Path, *, moments: Sequence[int]) -> None:
    """Means and log alphas of all filters of a first convolution, a column for each of a few epochs.

    Args:
        frames: ``(epochs, 2, filters, 1, height, width)``: means and log alphas after every epoch.
        path: Of the PNG.
        moments: Which epochs, counted from 1.
    """
    from knowable.core.support.figure import new_figure

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2, len(moments), squeeze=False)
        for column, epoch in enumerate(moments):
            _draw_frame(panels[:, column], frames[epoch - 1], epoch)

    new_figure(1.8 * len(moments), 4.2, draw).savefig(path, dpi=110)


def animate_filters(frames: Tensor, path: Path) -> None:
    """The same as a GIF: a picture for each epoch, or for every so many where there are more than forty."""
    from PIL import Image

    from knowable.core.support.figure import new_figure

    pictures = []
    every = -(-len(frames) // _MOST_FRAMES)
    for epoch in range(1, len(frames) + 1, every):
        frame = frames[epoch - 1]
        figure = new_figure(3.6, 2.4, lambda figure, f=frame, e=epoch: _draw_frame(figure.subplots(1, 2), f, e))
        figure.set_dpi(80)
        figure.canvas.draw()
        pixels: Any = figure.canvas
        pictures.append(Image.fromarray(np.asarray(pixels.buffer_rgba())[..., :3]).quantize(32))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=200, loop=0)


def _draw_frame(panels: Sequence[Axes], frame: Tensor, epoch: int) -> None:
    """Means and log alphas of one epoch in two panels."""
    mean, log_alpha = (tiled(part.float()) for part in frame)
    largest = mean.nan_to_num().abs().max().item() or 1.0
    panels[0].imshow(mean.numpy(), cmap="RdBu", vmin=-largest, vmax=largest)
    panels[1].imshow(log_alpha.numpy(), cmap="PuOr_r", vmin=THRESHOLD - _LIMIT, vmax=THRESHOLD + _LIMIT)
    for panel, title in zip(panels, (f"means, epoch {epoch}", "log alpha"), strict=True):
        panel.set_title(title)
        panel.set_axis_off()


def tiled(filters: Tensor, *, columns: int = 5) -> Tensor:
    """Filters ``(n, 1, height, width)`` side by side, with an empty line between them."""
    count, _, height, width = filters.shape
    rows = -(-count // columns)
    sheet = filters.new_full((rows * (height + 1) - 1, columns * (width + 1) - 1), torch.nan)
    for i, each in enumerate(filters[:, 0]):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[top : top + height, left : left + width] = each
    return sheet
