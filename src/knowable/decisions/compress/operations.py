"""What the nodes of a network's graph do to units (features or channels), in the few kinds that matter here.

A :class:`Layer` mixes units by its weights. A :class:`Pass` treats each unit by itself. :class:`Join`,
:class:`Concatenate`, :class:`Merge` and :class:`Move` rearrange them. :class:`Opaque` is everything else: units that go
into it stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

Constants = Tensor
"""The value of each unit where it is the same for every input, NaN where it is not; double precision."""


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution: reads units of ``source`` by weights, makes new ones."""

    source: Node
    path: str


@dataclass(frozen=True)
class Pass:
    """Unit by unit: activations, pooling, batch normalisation, depthwise convolutions.

    Attributes:
        source: What it acts on.
        constant: What becomes of units that are constant.
        path: The module whose parameters belong to the units one by one, if any.
        dim: The dimension the units must lie along, or None for any.
        ndim: How many dimensions the input must have, or None for any.
        alias: Whether the result shares memory with the source.
    """

    source: Node
    constant: Callable[[Constants], Constants]
    path: str | None = None
    dim: int | None = None
    ndim: int | None = None
    alias: bool = False


@dataclass(frozen=True)
class Join:
    """Two tensors of the same units combined unit by unit: a sum, a product."""

    sources: tuple[Node, Node]
    combine: Callable[[Constants, Constants], Constants]
    adds: bool = False


@dataclass(frozen=True)
class Concatenate:
    """Units of several tensors side by side, along ``dim``."""

    sources: tuple[Node, ...]
    dim: int


@dataclass(frozen=True)
class Merge:
    """Dimensions ``start`` to ``end`` become one: flatten, and views and squeezes that amount to it.

    Attributes:
        source: What it acts on.
        start: The first of the merged dimensions.
        end: The last.
        sizes: The sizes a view was asked for, -1 where it is to find out itself; None if no size is written down.
    """

    source: Node
    start: int
    end: int
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Move:
    """Dimensions in another order; those not in ``order`` are averaged over or reduced to their largest value."""

    source: Node
    order: tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """A question about a shape. Its answer changes when units go, if it is about their dimension."""

    source: Node


@dataclass(frozen=True)
class Opaque:
    """Anything else: what goes in stays as it is.

    Attributes:
        sources: What it acts on.
        why: For the notes; empty if there is nothing to say.
    """

    sources: tuple[Node, ...]
    why: str = ""


Operation = Layer | Pass | Join | Concatenate | Merge | Move | Ask | Opaque


def same(values: Constants) -> Constants:
    """Constants stay what they are."""
    return values


def zeros_only(values: Constants) -> Constants:
    """Only zeros stay constant: at borders padded with zeros other values do not."""
    return values.where(values == 0, torch.nan)


def unknown(values: Constants) -> Constants:
    """Nothing stays constant."""
    return torch.full_like(values, torch.nan)


def applied(function: Callable[[Tensor], Tensor]) -> Callable[[Constants], Constants]:
    """Constants go through ``function``; what is not finite counts as unknown."""

    def constant(values: Constants) -> Constants:
        with torch.no_grad():
            found = function(values.clone())
        return found.where(values.isfinite() & found.isfinite(), torch.nan)

    return constant


def combined(function: Callable[[Tensor, Tensor], Tensor], *, product: bool) -> Callable[..., Constants]:
    """Two constants give a constant; nothing times zero is zero, whatever the other factor is."""

    def constant(left: Constants, right: Constants) -> Constants:
        with torch.no_grad():
            found = function(left.clone(), right.clone())
        found = found.where(left.isfinite() & right.isfinite() & found.isfinite(), torch.nan)
        return torch.where((left == 0) | (right == 0), 0.0, found) if product else found

    return constant
