"""Shift: rotated and corrupted images, and how accuracy and calibration fall as it grows (``kn.shift``).

The transforms work on images ``(rows, height, width)`` or ``(rows, channels, height, width)`` and on nothing else; they
are plain tensor operations, the same on every call with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.core.support.figure import COLOURS, new_figure
from knowable.core.support.randomness import generator_for
from knowable.core.support.tensors import check_finite, to_tensor
from knowable.errors import InvalidArgument, InvalidData, InvalidType
from knowable.evaluation.evaluate import evaluate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEVERITIES = (1, 2, 3, 4, 5)


# --- transforms -------------------------------------------------------------------------------------------------------


def rotate(x: Any, degrees: float) -> Tensor:
    """Rotate images about their centres, counter-clockwise, by bilinear interpolation.

    Args:
        x: Images, ``(rows, [channels,] height, width)``, floating point.
        degrees: The angle.

    Returns:
        Images of the same shape. What comes from outside of an image has the image's smallest value.
    """
    images, degrees = _images(x), check_number("degrees", degrees)
    height, width = images.shape[-2:]
    angle = math.radians(degrees)
    rows, columns = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) - (height - 1) / 2,
        torch.arange(width, dtype=torch.float64) - (width - 1) / 2,
        indexing="ij",
    )
    from_column = math.cos(angle) * columns - math.sin(angle) * rows
    from_row = math.sin(angle) * columns + math.cos(angle) * rows
    grid = torch.stack((from_column / width, from_row / height), -1) * 2.0  # edges of the image are at -1 and 1
    least = images.flatten(1).amin(1).view(-1, 1, 1, 1)
    grid = grid.to(images).expand(len(images), -1, -1, -1)
    moved = F.grid_sample(images - least, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return (moved + least).view_as(to_tensor(x, "x"))


def corrupt(x: Any, kind: str, severity: int = 3, *, clip: tuple[float, float] | None = None, seed: int = 0) -> Tensor:
    """Corrupt images, in five grades (after Hendrycks and Dietterich, 2019).

    Grades are relative to the range of the pixels, which ``clip`` gives.

    Args:
        x: Images, ``(rows, [channels,] height, width)``, floating point.
        kind: ``"gaussian_noise"``; ``"blur"`` (by a Gaussian); ``"contrast"`` (towards the image's mean);
            ``"brightness"`` (added); ``"occlusion"`` (a square of the smallest value, at a random place); or
            ``"pixelate"`` (fewer, larger pixels).
        severity: 1 to 5.
        clip: Smallest and largest value of a pixel; results stay between. None: those of ``x``.
        seed: Of the noise and of the places.

    Returns:
        Images of the same shape.
    """
    function = _CORRUPTIONS[check_choice("kind", kind, _CORRUPTIONS)]
    grade = check_count("severity", severity, at_most=5) - 1
    images = _images(x)
    low, high = (images.min().item(), images.max().item()) if clip is None else clip
    if not low <= high:
        raise InvalidArgument(f"clip must be a smallest and a largest value, got {clip!r}.")
    unit = (images - low) / (high - low if high > low else 1.0)
    moved = function(unit, grade, generator_for(seed, "corrupt", kind)).clamp(0.0, 1.0)
    return (moved * (high - low) + low).view_as(to_tensor(x, "x"))


def _images(x: Any) -> Tensor:
    """Images as ``(rows, channels, height, width)``."""
    images = to_tensor(x, "x")
    if not images.is_floating_point():
        raise InvalidType(f"x must hold floats, got {images.dtype}. Convert pixels: x.float() / 255.")
    if images.dim() not in (3, 4) or images.numel() == 0:
        raise InvalidData(
            f"x must be images (rows, height, width) or (rows, channels, height, width), got shape "
            f"{tuple(images.shape)}."
        )
    check_finite(images, "x")
    return images.unsqueeze(1) if images.dim() == 3 else images


def _gaussian_noise(x: Tensor, grade: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    return x + (0.08, 0.16, 0.24, 0.36, 0.50)[grade] * noise


def _blur(x: Tensor, grade: int, generator: torch.Generator) -> Tensor:
    del generator
    scale = (0.5, 0.8, 1.2, 1.8, 2.5)[grade] * x.shape[-1] / 28
    reach = min(math.ceil(3 * scale), min(x.shape[-2:]) - 1)
    place = torch.arange(-reach, reach + 1, dtype=x.dtype, device=x.device)
    kernel = torch.exp(-0.5 * (place / scale).square())
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, -1)
    padded = F.pad(x, (reach, reach, reach, reach), mode="reflect")
    along = F.conv2d(padded, kernel.unsqueeze(2), groups=x.shape[1])
    return F.conv2d(along, kernel.unsqueeze(3), groups=x.shape[1])


def _contrast(x: Tensor, grade: int, generator: torch.Generator) -> Tensor:
    del generator
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (0.75, 0.5, 0.4, 0.3, 0.15)[grade] * (x - mean)


def _brightness(x: Tensor, grade: int, generator: torch.Generator) -> Tensor:
    del generator
    return x + (0.1, 0.2, 0.3, 0.4, 0.5)[grade]


def _occlusion(x: Tensor, grade: int, generator: torch.Generator) -> Tensor:
    height, width = x.shape[-2:]
    side = [max(1, round((0.15, 0.25, 0.35, 0.45, 0.55)[grade] * size)) for size in (height, width)]
    top = torch.randint(0, height - side[0] + 1, (len(x), 1), generator=generator)
    left = torch.randint(0, width - side[1] + 1, (len(x), 1), generator=generator)
    rows, columns = torch.arange(height), torch.arange(width)
    inside = ((rows >= top) & (rows < top + side[0])).unsqueeze(2) & (
        (columns >= left) & (columns < left + side[1])
    ).unsqueeze(1)
    return x.masked_fill(inside.unsqueeze(1).to(x.device), 0.0)


def _pixelate(x: Tensor, grade: int, generator: torch.Generator) -> Tensor:
    del generator
    height, width = x.shape[-2:]
    small = [max(1, round((0.5, 0.36, 0.25, 0.18, 0.14)[grade] * size)) for size in (height, width)]
    return F.interpolate(F.interpolate(x, small, mode="area"), (height, width), mode="nearest-exact")


_CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "gaussian_noise": _gaussian_noise,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "occlusion": _occlusion,
    "pixelate": _pixelate,
}
CORRUPTIONS = tuple(_CORRUPTIONS)
"""Kinds of :func:`corrupt`."""


# --- accuracy and calibration against severity ------------------------------------------------------------------------


_SCORES = {"accuracy": "accuracy", "nll": "nll", "ece": "ece", "entropy": "mean_entropy"}


@dataclass(frozen=True, repr=False)
class ShiftCurve:
    """Scores against the size of a shift.

    Attributes:
        kind: The shift.
        severities: Its sizes: 0 (none) first, then grades or degrees.
        scores: Each score at each of them: ``accuracy``, ``nll``, ``ece`` and ``entropy`` (the mean total uncertainty).
        standard_errors: Of the accuracies, NLLs and entropies.
    """

    kind: str
    severities: tuple[float, ...]
    scores: dict[str, list[float]]
    standard_errors: dict[str, list[float]]

    def plot(self) -> Figure:
        """The scores against severity, with bars of two standard errors.

        Returns:
            The figure; ``figure.savefig("shift.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        return shift_plot({self.kind: self})

    def __repr__(self) -> str:
        unit = " degrees" if self.kind == "rotation" else ""
        head = f"ShiftCurve({self.kind})"
        lines = [
            f"  {severity:g}{unit}: " + ", ".join(f"{name} {values[k]:.3g}" for name, values in self.scores.items())
            for k, severity in enumerate(self.severities)
        ]
        return "\n".join([head, *lines])


def curve(
    posterior: Posterior,
    x: Any,
    y: Any,
    kind: str,
    *,
    severities: Sequence[float] | None = None,
    clip: tuple[float, float] | None = None,
    samples: int = 64,
    seed: int = 0,
) -> ShiftCurve:
    """Accuracy and calibration of a classifier as its inputs are rotated or corrupted.

    Args:
        posterior: The classifier.
        x: Images as it takes them.
        y: Their labels.
        kind: ``"rotation"``, or a kind of :func:`corrupt`.
        severities: Degrees (default 15 to 90 in steps of 15), or grades (default 1 to 5). No shift is always first.
        clip: As for :func:`corrupt`.
        samples: Number of draws in a prediction.
        seed: As for :func:`corrupt`.

    Returns:
        The curve.
    """
    check_type("posterior", posterior, Posterior, "a Posterior")
    check_choice("kind", kind, ("rotation", *CORRUPTIONS))
    if severities is None:
        severities = range(15, 91, 15) if kind == "rotation" else SEVERITIES
    if len(severities) == 0:
        raise InvalidArgument("severities must be at least one, got none.")
    scores: dict[str, list[float]] = {name: [] for name in _SCORES}
    errors: dict[str, list[float]] = {name: [] for name in _SCORES if name != "ece"}
    for severity in (0, *severities):
        if severity == 0:
            moved = to_tensor(x, "x")
        elif kind == "rotation":
            moved = rotate(x, severity)
        else:
            moved = corrupt(x, kind, int(severity), clip=clip, seed=seed)
        prediction = posterior.predict(moved, samples)
        if not isinstance(prediction, ClassPrediction):
            raise InvalidType("posterior must be of a classifier. For numbers use kn.evaluate at each severity.")
        found = evaluate(prediction, y)
        for name, score in _SCORES.items():
            scores[name].append(found[score])
            if name in errors:
                errors[name].append(found.standard_errors[score])
    return ShiftCurve(kind, (0.0, *map(float, severities)), scores, errors)


def shift_plot(curves: dict[str, ShiftCurve]) -> Figure:
    """Curves of several posteriors (or kinds of shift) over each other, by name.

    Args:
        curves: With the same severities.

    Returns:
        The figure; ``figure.savefig("shift.png")`` writes it.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    if not curves:
        raise InvalidArgument("curves must be at least one curve by name, got none.")
    kinds = {each.kind for each in curves.values()}
    label = "rotation (degrees)" if kinds == {"rotation"} else "severity"
    titles = {"accuracy": "accuracy", "nll": "NLL (nats)", "ece": "calibration error", "entropy": "entropy (nats)"}

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 4)
        for (name, title), place in zip(titles.items(), axes, strict=True):
            for index, (who, each) in enumerate(curves.items()):
                bars = each.standard_errors.get(name)
                place.errorbar(
                    each.severities, each.scores[name], None if bars is None else [2 * bar for bar in bars],
                    color=COLOURS[index % len(COLOURS)], marker="o", markersize=3, linewidth=1.4, elinewidth=0.8,
                    label=who.replace("_", " "),
                )  # fmt: skip
            place.set(xlabel=label, title=title, ylim=(0, 1.02) if name == "accuracy" else (0, None))
        axes[0].legend(loc="lower left")

    return new_figure(9.6, 2.9, draw)
