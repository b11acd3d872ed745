"""Images whose every pixel has a label, made by a formula."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.support.checks import check_count
from knowable.errors import InvalidArgument

_BRIGHTNESS = torch.tensor([0.0, 1.0, -1.0])  # of each class
_NOISE = torch.tensor([0.1, 0.2, 0.4])  # standard deviation of a pixel, of each class
_BLUR = 0.7  # pixels over which a border is uncertain: scale of the logistic distribution of where it is drawn


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images and the class of each of their pixels; unpacks as ``x, y = images``.

    Attributes:
        x: Images, ``(n, 1, size, size)``, floating point.
        y: Masks, ``(n, size, size)``, whole numbers that index ``classes``.
        probs: The probability of each class at each pixel with which the masks were drawn,
            ``(n, classes, size, size)``. Its entropy is what no amount of data would take away.
        classes: Names of the classes.
    """

    x: Tensor
    y: Tensor
    probs: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack as ``x, y = images``."""
        return iter((self.x, self.y))


def shapes(n: int = 100, size: int = 32, seed: int = 0) -> LabelledImages:
    r"""Bright discs and dark squares on grey, whose borders every annotator would draw a little differently.

    Each quarter of an image holds a disc (class 1), a square (class 2) or nothing, with equal probability, at a random
    place and of a random size. With d the distance in pixels from the true border, positive inside, a pixel belongs to
    the shape with probability

    .. math:: p = \frac{1}{1 + e^{-d / 0.7}}

    The mask is drawn from that: an annotator's border is the true one moved in or out by a number of pixels from a
    logistic distribution, the same all around the shape. The image blends brightness (0, 1 and -1 for ground, disc and
    square) and the standard deviation of its noise (0.1, 0.2 and 0.4) by p, so that it does not tell where the border
    was drawn.

    Args:
        n: Images.
        size: Height and width in pixels: an even number, at least 16.
        seed: The same seed gives the same images.

    Example:
        >>> x, y = shapes(5)
        >>> x.shape, y.shape
        (torch.Size([5, 1, 32, 32]), torch.Size([5, 32, 32]))
    """
    n, size = check_count("n", n), check_count("size", size, at_least=16)
    if size % 2:
        raise InvalidArgument(f"size must be even, got {size}: an image has four quarters.")
    generator = torch.Generator().manual_seed(check_count("seed", seed, at_least=0))
    half = size // 2
    kind = torch.randint(3, (n, 4), generator=generator)  # class of each quarter's shape, 0 for none
    radius = half * (0.2 + 0.15 * torch.rand(n, 4, generator=generator))
    margin = radius + 2.0
    centre = margin.unsqueeze(-1) + (half - 2 * margin).unsqueeze(-1) * torch.rand(n, 4, 2, generator=generator)
    offset = torch.rand(n, 4, generator=generator)  # where the annotator draws, as a probability
    noise = torch.randn(n, 1, size, size, generator=generator)

    pixels = torch.arange(half) + 0.5
    grid = torch.stack(torch.meshgrid(pixels, pixels, indexing="ij"), dim=-1)  # (half, half, 2)
    away = grid - centre[:, :, None, None]  # (n, 4, half, half, 2)
    distance = torch.where(_over(kind) == 1, away.norm(dim=-1), away.abs().amax(-1))
    inside = torch.sigmoid((_over(radius) - distance) / _BLUR) * (_over(kind) > 0)

    share = _joined(inside).unsqueeze(1)  # (n, 1, size, size): probability of the shape
    label = _joined(_over(kind).expand_as(inside))  # class of the quarter's shape
    y = _joined((inside > _over(offset)) * _over(kind))
    probs = torch.zeros(n, 3, size, size, dtype=share.dtype).scatter_(1, label.unsqueeze(1), share)
    probs[:, :1] = 1 - share
    x = _mixed(_BRIGHTNESS, probs) + _mixed(_NOISE, probs) * noise
    return LabelledImages(x, y, probs, ("ground", "disc", "square"))


def _over(values: Tensor) -> Tensor:
    """Numbers of quarters ``(n, 4)`` in front of their pixels."""
    return values[:, :, None, None]


def _joined(quarters: Tensor) -> Tensor:
    """Quarters ``(n, 4, half, half)``, row by row, as images ``(n, size, size)``."""
    rows, _, half, _ = quarters.shape
    return quarters.view(rows, 2, 2, half, half).transpose(2, 3).reshape(rows, 2 * half, 2 * half)


def _mixed(values: Tensor, probs: Tensor) -> Tensor:
    """The mean over classes of their ``values`` at each pixel, ``(n, 1, size, size)``."""
    return (probs * values.to(probs).view(1, -1, 1, 1)).sum(1, keepdim=True)
