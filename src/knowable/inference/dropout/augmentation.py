"""Changes of the input that leave its meaning alone, for test-time augmentation.

An augmentation draws one change and makes it to all rows, so that a draw is one function of the input, like a draw of
the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.checks import check_count, check_number
from knowable.errors import InvalidArgument, InvalidType, Unsupported


class Augmentation(ABC):
    """A random change of inputs. Concrete ones are frozen dataclasses of plain numbers, so that they can be saved."""

    @abstractmethod
    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one change and make it to all rows of ``x``."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


def augmentation_from(saved: dict[str, Any]) -> Augmentation:
    """Back from plain values; only the augmentations of this module are made."""
    known: dict[str, Any] = {cls.__name__: cls for cls in (InputNoise, Shift, Flip)}
    values = dict(saved)
    cls = known[values.pop("name")]
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@dataclass(frozen=True)
class InputNoise(Augmentation):
    r"""Normal noise on every input: :math:`x + s\,\xi`, with one ξ for all rows.

    Args:
        scale: Standard deviation s, in the units of the inputs.
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """``x`` with noise."""
        if not x.is_floating_point():
            raise Unsupported("Whole numbers (words, classes) cannot have normal noise. Use another augmentation.")
        noise = torch.randn(x.shape[1:], generator=generator, dtype=x.dtype, device=x.device)
        return x + self.scale * noise


@dataclass(frozen=True)
class Shift(Augmentation):
    """Images moved by up to some pixels, in each direction as likely; what comes in from outside is 0.

    Args:
        pixels: The furthest move.
        dims: Dimensions along which they move: height and width, the last two of images.
    """

    pixels: int = 1
    dims: tuple[int, ...] = (-2, -1)

    def __post_init__(self) -> None:
        check_count("pixels", self.pixels)
        object.__setattr__(self, "dims", _dims("dims", self.dims))

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """``x``, moved."""
        for dim in self.dims:
            high = self.pixels + 1
            move = int(torch.randint(-self.pixels, high, (), generator=generator, device=generator.device))
            x = _moved(x, move, dim)
        return x


@dataclass(frozen=True)
class Flip(Augmentation):
    """Images mirrored, every other time.

    Args:
        dims: Dimensions along which they are mirrored, each by itself: the width, the last one of images.
    """

    dims: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", _dims("dims", self.dims))

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """``x``, mirrored or not."""
        coins = torch.rand(len(self.dims), generator=generator, device=generator.device) < 0.5
        chosen = [dim for dim, coin in zip(self.dims, coins.tolist(), strict=True) if coin]
        return x.flip(chosen) if chosen else x


def _moved(x: Tensor, move: int, dim: int) -> Tensor:
    if move == 0:
        return x
    kept = max(0, x.shape[dim] - abs(move))
    moved = torch.zeros_like(x)
    source = x.narrow(dim, 0 if move > 0 else x.shape[dim] - kept, kept)
    moved.narrow(dim, x.shape[dim] - kept if move > 0 else 0, kept).copy_(source)
    return moved


def _dims(name: str, dims: Any) -> tuple[int, ...]:
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        raise InvalidType(f"{name} must be dimensions such as (-2, -1), got {dims!r}.")
    if not dims or 0 in dims:
        raise InvalidArgument(f"{name} must be one or several dimensions other than 0, which is the rows'; got {dims}.")
    return tuple(dims)
