"""Search spaces: what points are, and how they become rows of numbers between 0 and 1."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.support.checks import check_count, check_number, check_type
from knowable.errors import InvalidArgument, InvalidData, InvalidType

_MOST_TRIED = 64  # values of a whole number that are tried one by one
_EDGE = 1e-9  # relative rounding that a point at the edge of its interval may have


@dataclass(frozen=True)
class Real:
    """A number in an interval.

    Args:
        low: Lower end.
        high: Upper end.
        log: Whether the logarithm of the number is what matters, as for learning rates.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        low, high = check_number("low", self.low), check_number("high", self.high)
        if low >= high:
            raise InvalidArgument(f"low must be below high, got low={self.low!r} and high={self.high!r}.")
        if self.log and low <= 0:
            raise InvalidArgument(f"low must be > 0 for a logarithmic interval, got {self.low!r}.")

    width = 1

    def encode(self, value: Any, name: str) -> list[float]:
        """The value between 0 and 1."""
        low, high = self._scale(self.low), self._scale(self.high)
        number = _number_in(value, name, self.low, self.high)
        return [min(1.0, max(0.0, (self._scale(number) - low) / (high - low)))]

    def decode(self, row: Sequence[float]) -> float:
        """The inverse of :meth:`encode`."""
        low, high = self._scale(self.low), self._scale(self.high)
        value = low + row[0] * (high - low)
        return min(max(math.exp(value) if self.log else value, self.low), self.high)

    def from_uniform(self, u: Tensor) -> Tensor:
        """Encoded values ``(n, 1)`` from numbers ``(n,)`` between 0 and 1."""
        return u.unsqueeze(1)

    def _scale(self, value: float) -> float:
        return math.log(value) if self.log else float(value)


@dataclass(frozen=True)
class Integer:
    """A whole number.

    Args:
        low: The smallest.
        high: The largest.
    """

    low: int
    high: int

    width = 1

    def __post_init__(self) -> None:
        low, high = (check_count(name, getattr(self, name), at_least=-(2**53)) for name in ("low", "high"))
        if low >= high:
            raise InvalidArgument(f"low must be below high, got low={self.low!r} and high={self.high!r}.")

    @property
    def count(self) -> int:
        """Number of values."""
        return self.high - self.low + 1

    def encode(self, value: Any, name: str) -> list[float]:
        """The value between 0 and 1."""
        number = _number_in(value, name, self.low, self.high)
        if number != round(number):
            raise InvalidArgument(f"{name} must be a whole number, got {value!r}.")
        return [(round(number) - self.low) / (self.high - self.low)]

    def decode(self, row: Sequence[float]) -> int:
        """The nearest whole number."""
        return min(max(self.low + round(row[0] * (self.high - self.low)), self.low), self.high)

    def from_uniform(self, u: Tensor) -> Tensor:
        """Encoded values ``(n, 1)`` from numbers ``(n,)`` between 0 and 1."""
        return ((u * self.count).floor().clamp(0, self.count - 1) / (self.count - 1)).unsqueeze(1)

    def alternatives(self, row: Tensor) -> Tensor:
        """Encoded values that can take the place of one: all of them, or where they are many some, and its neighbours.

        ``(n, 1)``.
        """
        if self.count <= _MOST_TRIED:
            return torch.linspace(0, 1, self.count, dtype=torch.float64).unsqueeze(1)
        here = self.decode(row.tolist()) - self.low
        steps = torch.tensor([-10, -3, -2, -1, 0, 1, 2, 3, 10]) + here
        spread = torch.linspace(0, self.count - 1, _MOST_TRIED).round().long()
        return (torch.cat([spread, steps]).clamp(0, self.count - 1).double() / (self.count - 1)).unsqueeze(1)


@dataclass(frozen=True)
class Choice:
    """One of some options without an order.

    Args:
        options: At least two, of any kind.
    """

    options: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.options, str) or not isinstance(self.options, Sequence):
            raise InvalidType(f"options must be a list, got a {type(self.options).__name__}.")
        options = list(self.options)
        if len(options) < 2 or any(each in options[:place] for place, each in enumerate(options)):
            raise InvalidArgument(f"options must be at least two different ones, got {options!r}.")

    @property
    def width(self) -> int:
        """Number of columns: one for each option."""
        return len(self.options)

    @property
    def count(self) -> int:
        """Number of values."""
        return len(self.options)

    def encode(self, value: Any, name: str) -> list[float]:
        """One-hot."""
        if value not in list(self.options):
            raise InvalidArgument(f"{name} must be one of {', '.join(map(repr, self.options))}; got {value!r}.")
        place = list(self.options).index(value)
        return [float(place == k) for k in range(self.width)]

    def decode(self, row: Sequence[float]) -> Any:
        """The option with the largest value."""
        return self.options[max(range(self.width), key=lambda k: row[k])]

    def from_uniform(self, u: Tensor) -> Tensor:
        """Encoded values ``(n, options)`` from numbers ``(n,)`` between 0 and 1."""
        return torch.eye(self.width, dtype=u.dtype)[(u * self.width).long().clamp(0, self.width - 1)]

    def alternatives(self, row: Tensor) -> Tensor:
        """All options, ``(options, options)``."""
        return torch.eye(self.width, dtype=torch.float64)


Dimension = Real | Integer | Choice
Point = dict[str, Any] | list[Any]


class Space:
    """Dimensions side by side.

    Args:
        dimensions: By name, or in a list: ``(low, high)``, ``Real``, ``Integer`` or ``Choice``.
    """

    def __init__(self, dimensions: Mapping[str, Any] | Sequence[Any]):
        check_type("space", dimensions, (Mapping, list, tuple), "a dict or a list of dimensions, such as [(0, 1)]")
        if not dimensions:
            raise InvalidArgument("space is empty: it needs at least one dimension.")
        named = isinstance(dimensions, Mapping)
        self.names: list[str] | None = [str(name) for name in dimensions] if named else None
        given = list(dimensions.values()) if isinstance(dimensions, Mapping) else list(dimensions)
        self.dimensions = [_dimension(each, self._name(place)) for place, each in enumerate(given)]
        ends = list(itertools.accumulate(each.width for each in self.dimensions))
        self.columns = [slice(end - each.width, end) for end, each in zip(ends, self.dimensions, strict=True)]
        self.width = ends[-1]

    def _name(self, place: int) -> str:
        return f"space[{place}]" if self.names is None else f"space[{self.names[place]!r}]"

    @property
    def discrete(self) -> list[int]:
        """Places of the dimensions that are not intervals."""
        return [place for place, each in enumerate(self.dimensions) if not isinstance(each, Real)]

    @property
    def size(self) -> float:
        """Number of points; infinite where a dimension is an interval."""
        return math.prod(math.inf if isinstance(each, Real) else each.count for each in self.dimensions)

    def encode(self, point: Any) -> list[float]:
        """The row of a point, or an error that says what is wrong with it."""
        return [column for each, value, place in self._parts(point) for column in each.encode(value, self._at(place))]

    def _at(self, place: int) -> str:
        return f"point[{place}]" if self.names is None else f"point[{self.names[place]!r}]"

    def _parts(self, point: Any) -> list[tuple[Any, Any, int]]:
        if self.names is not None:
            if not isinstance(point, Mapping) or {str(name) for name in point} != set(self.names):
                raise InvalidData(f"A point must be a dict with {', '.join(map(repr, self.names))}, got {point!r}.")
            values = [point[name] for name in self.names]
        else:
            values = point.tolist() if hasattr(point, "tolist") else point
            if isinstance(values, str | Mapping) or not isinstance(values, Sequence):
                raise InvalidData(f"A point must be a list of {len(self.dimensions)} values, got {point!r}.")
            if len(values) != len(self.dimensions):
                raise InvalidData(f"A point must have {len(self.dimensions)} values, got {len(values)}: {point!r}.")
        return list(zip(self.dimensions, values, range(len(values)), strict=True))

    def decode(self, row: Tensor) -> Point:
        """The point nearest to a row."""
        values = [each.decode(row[own].tolist()) for each, own in zip(self.dimensions, self.columns, strict=True)]
        return values if self.names is None else dict(zip(self.names, values, strict=True))

    def from_uniform(self, u: Tensor) -> Tensor:
        """Rows ``(n, width)`` of points from numbers ``(n, dimensions)`` between 0 and 1."""
        return torch.cat([each.from_uniform(u[:, place]) for place, each in enumerate(self.dimensions)], 1)

    def plain(self, points: Sequence[Point]) -> list[list[Any]]:
        """Points as they are saved: numbers, and the places of options."""
        found = []
        for point in points:
            values = [point[name] for name in self.names] if isinstance(point, dict) and self.names else list(point)
            pairs = zip(self.dimensions, values, strict=True)
            found.append([list(d.options).index(v) if isinstance(d, Choice) else _plain_number(v) for d, v in pairs])
        return found

    def from_plain(self, rows: Sequence[Sequence[Any]]) -> list[Point]:
        """The inverse of :meth:`plain`."""
        found: list[Point] = []
        for row in rows:
            pairs = zip(self.dimensions, row, strict=True)
            values = [d.options[v] if isinstance(d, Choice) else v for d, v in pairs]
            found.append(values if self.names is None else dict(zip(self.names, values, strict=True)))
        return found

    def alternatives(self, row: Tensor, place: int) -> Tensor:
        """Rows that differ from one in a discrete dimension alone, ``(n, width)``."""
        values = self.dimensions[place].alternatives(row[self.columns[place]])  # type: ignore[union-attr]
        rows = row.repeat(len(values), 1)
        rows[:, self.columns[place]] = values
        return rows

    def every_row(self) -> Tensor:
        """The rows of all points of a space without intervals."""
        rows = torch.zeros(1, self.width, dtype=torch.float64)
        for each, own in zip(self.dimensions, self.columns, strict=True):
            count = each.count  # type: ignore[union-attr]
            values = each.from_uniform((torch.arange(count, dtype=torch.float64) + 0.5) / count)
            rows = rows.repeat_interleave(count, 0)
            rows[:, own] = values.repeat(len(rows) // count, 1)
        return rows


def _plain_number(value: Any) -> int | float:
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, int) else float(number)


def _dimension(given: Any, name: str) -> Dimension:
    if isinstance(given, Real | Integer | Choice):
        return given
    if isinstance(given, list | tuple) and len(given) == 2:
        try:
            return Real(*given)
        except (InvalidArgument, InvalidType) as error:
            raise type(error)(f"{name}: {error}") from None
    raise InvalidType(
        f"{name} must be (low, high), kn.Real, kn.Integer or kn.Choice, got {given!r}. Options without an order are "
        f"kn.Choice([...])."
    )


def _number_in(value: Any, name: str, low: float, high: float) -> float:
    if isinstance(value, bool) or (not isinstance(value, numbers.Real) and not hasattr(value, "item")):
        raise InvalidType(f"{name} must be a number, got {value!r}.")
    number = float(value)
    edge = _EDGE * (high - low)
    if not low - edge <= number <= high + edge:
        raise InvalidArgument(f"{name} must be from {low:g} to {high:g}, got {value!r}: it is outside of the space.")
    return min(max(number, low), high)
