"""Plots of sparse variational dropout: the sparsity of each layer, and one weight matrix through training.

The plots return a matplotlib ``Figure`` and touch nothing global: no pyplot, no backend; ``figure.savefig`` writes it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_count, check_number, check_type
from knowable.core.support.figure import COLOURS, GRID, INK, MUTED, new_figure
from knowable.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_PREFIX = "sparsity."
_RANGE = 10.0  # of log alpha, either side of 0
_QUANTILE = 0.995  # of the means' absolute values, where their colours end
_WIDEST = 3.0  # aspect ratio of the picture of a weight


def sparsity_plot(posterior: Posterior | Sequence[dict[str, float]]) -> Figure:
    """The sparsity of each weight (the share of its elements with log alpha above the threshold) against the epoch.

    Args:
        posterior: Posterior of ``SparseVariationalDropout``, or its history (``posterior.diagnostics.history``).

    Returns:
        The figure; ``figure.savefig("sparsity.png")`` writes it.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    history = posterior.diagnostics.history if isinstance(posterior, Posterior) else list(posterior)
    names = [key for key in (history[-1] if history else {}) if key.startswith(_PREFIX)]
    if not names:
        raise InvalidArgument(
            "posterior has no record of sparsity: fit SparseVariationalDropout, and pass its posterior."
        )

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for index, name in enumerate(names):
            colour, dashes = COLOURS[index % len(COLOURS)], ("-", "--", ":")[index // len(COLOURS) % 3]
            values = [(record["epoch"], 100 * record[name]) for record in history if name in record]
            label = f"{name.removeprefix(_PREFIX)}, {values[-1][1]:.1f}% at the end"
            axes.plot(*zip(*values, strict=True), color=colour, linestyle=dashes, linewidth=1.5, label=label)
        axes.set(xlabel="epoch", ylabel="sparsity (%)", ylim=(-2, 102))
        axes.grid(color=GRID, linewidth=0.6)
        axes.legend(loc="lower right" if len(names) < 6 else "best")

    return new_figure(6.4, 3.6, draw)


def weights_plot(posterior: Posterior, *, moments: int = 5) -> Figure:
    """A watched weight at some moments of its training: its means above, log alpha below.

    Args:
        posterior: Posterior of ``SparseVariationalDropout(watch=...)``.
        moments: How many moments are shown, evenly spaced from the first epoch to the last.

    Returns:
        The figure; ``figure.savefig("weights.png")`` writes it.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    frames, name, threshold = _frames_of(posterior)
    check_count("moments", moments)
    chosen = _spaced(moments, len(frames))
    limit = _colour_limit(frames)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(2, len(chosen), squeeze=False)
        for column, index in enumerate(chosen):
            mean, log_alpha = _picture(frames[index])
            _draw(grid[0, column], mean, "RdBu_r", limit)
            _draw(grid[1, column], log_alpha.clamp(-_RANGE, _RANGE), "viridis_r", _RANGE)
            grid[0, column].set_title(_caption(index, log_alpha, threshold), color=INK)
        for row, label in zip(grid, ("mean", "log alpha"), strict=True):
            figure.colorbar(row[-1].images[0], ax=list(row), label=label, fraction=0.05, pad=0.02)
        figure.suptitle(f"{name} through training", color=INK, fontweight="bold", x=0.01, ha="left")

    high, wide = _picture(frames[0]).shape[-2:]
    side = 1.9 if len(chosen) > 1 else 3.0
    return new_figure(1.4 + side * len(chosen), 0.7 + 2 * side * min(1.6, max(0.45, high / wide)), draw)


def weights_film(posterior: Posterior, path: str | os.PathLike[str], *, most: int = 60, seconds: float = 8.0) -> Path:
    """Write a film of a watched weight through training: its means beside log alpha, epoch after epoch.

    Args:
        posterior: Posterior of ``SparseVariationalDropout(watch=...)``.
        path: A file that ends in ``.gif``, or a folder for one PNG for each moment (created if missing).
        most: Largest number of moments, evenly spaced.
        seconds: Length of the film.

    Returns:
        The path.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    frames, name, threshold = _frames_of(posterior)
    check_count("most", most)
    check_number("seconds", seconds, above=0)
    path = Path(path)
    if path.suffix not in ("", ".gif"):
        raise InvalidArgument(f"path must be a .gif or a folder, got {path.name!r}.")
    chosen, limit = _spaced(most, len(frames)), _colour_limit(frames)
    pictures = [_moment(frames, index, name, threshold, limit) for index in chosen]
    if path.suffix == ".gif":
        _write_gif(path, pictures, seconds)
    else:
        path.mkdir(parents=True, exist_ok=True)
        for index, picture in zip(chosen, pictures, strict=True):
            _image(picture).save(path / f"epoch_{index + 1:05d}.png")
    return path


# --- one moment ------------------------------------------------------------------------------------------------------


def _frames_of(posterior: Any) -> tuple[Tensor, str, float]:
    """The frames ``(epochs, 2, *shape)`` of a posterior, the weight's name and the threshold of log alpha."""
    check_type("posterior", posterior, Posterior, "a fitted posterior")
    frames = getattr(posterior, "frames", None)
    if not isinstance(frames, Tensor):
        raise InvalidType("posterior has no frames: fit SparseVariationalDropout(watch=...) with the weight's name.")
    return frames.float().cpu(), str(getattr(posterior, "watched", "")), posterior.log_alpha_threshold


def _spaced(number: int, epochs: int) -> list[int]:
    """Indices of evenly spaced epochs, the first and the last among them."""
    return sorted({round(each) for each in np.linspace(0, epochs - 1, min(number, epochs))})


def _picture(frame: Tensor) -> Tensor:
    """A frame ``(2, *shape)`` as two pictures ``(2, outputs, inputs)``, rearranged if too wide or too high."""
    flat = frame.flatten(2)
    high, wide = flat.shape[1:]
    if max(high, wide) <= _WIDEST * min(high, wide):
        return flat
    columns = max(1, round(math.sqrt(high * wide)))  # a strip: laid out row after row
    padding = -high * wide % columns
    return torch.nn.functional.pad(flat.flatten(1), (0, padding), value=torch.nan).view(2, -1, columns)


def _colour_limit(frames: Tensor) -> float:
    """Where the colours of the means end."""
    sizes = frames[:, 0].abs().flatten()
    some = sizes[:: max(1, len(sizes) // 1_000_000)]
    return max(torch.quantile(some, _QUANTILE).item(), 1e-6)


def _caption(index: int, log_alpha: Tensor, threshold: float) -> str:
    seen = log_alpha[~log_alpha.isnan()]
    return f"epoch {index + 1}\n{100 * (seen > threshold).double().mean().item():.1f}% sparse"


def _draw(axes: Axes, values: Tensor, colours: str, limit: float) -> AxesImage:
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=MUTED, linewidth=0.6)
    return axes.imshow(values.numpy(), cmap=colours, vmin=-limit, vmax=limit, interpolation="none", aspect="auto")


def _moment(frames: Tensor, index: int, name: str, threshold: float, limit: float) -> Figure:
    """The picture of one epoch."""
    mean, log_alpha = _picture(frames[index])

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        means = _draw(left, mean, "RdBu_r", limit)
        noise = _draw(right, log_alpha.clamp(-_RANGE, _RANGE), "viridis_r", _RANGE)
        figure.colorbar(means, ax=left, orientation="horizontal", label="mean", pad=0.02, aspect=30)
        figure.colorbar(noise, ax=right, orientation="horizontal", label="log alpha", pad=0.02, aspect=30)
        title = f"{name}, {_caption(index, log_alpha, threshold)}".replace("\n", ", ")
        figure.suptitle(title, color=INK, fontweight="bold", x=0.01, ha="left")

    return new_figure(7.2, 4.2, draw)


def _image(figure: Figure) -> Any:
    from PIL import Image  # matplotlib brings it

    canvas: Any = figure.canvas
    return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")


def _write_gif(path: Path, pictures: list[Figure], seconds: float) -> None:
    first, *others = [_image(picture).quantize(128) for picture in pictures]
    each = max(20, round(1000 * seconds / len(pictures)))  # milliseconds
    durations = [each] * len(others) + [max(each, 1500)]  # the last one stays a while
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0)
