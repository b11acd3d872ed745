"""How covariances go through the layers of a network of infinite width, one step of the recursion each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.network.params import Params
from knowable.errors import Unsupported
from knowable.inference.functional.activations import DualActivation


@dataclass(frozen=True)
class Block:
    """Covariances of a unit, the mean over units: ``(*lead, *places)``, or ``(*lead, *places, *places)`` where full."""

    kernel: Tensor
    tangent: Tensor | None  # None where it is 0: at the inputs
    places: tuple[int, ...]
    full: bool

    def each(
        self, change: Callable[[Tensor], Tensor], places: tuple[int, ...] | None = None, full: Any = None
    ) -> Block:
        """The same linear change of kernel and tangent."""
        tangent = None if self.tangent is None else change(self.tangent)
        places, full = self.places if places is None else places, self.full if full is None else full
        return Block(change(self.kernel), tangent, places, full)

    @property
    def copies(self) -> int:
        """How often places occur among the dimensions."""
        return 2 if self.full else 1


@dataclass(frozen=True)
class State:
    """What is known in front of a layer: covariances of rows with others, and of each row with itself."""

    cross: Block  # (n, m, ...), or (n, ...) where each row is paired with itself
    left: Block  # (n, ...)
    right: Block  # (m, ...)
    units: int  # over which the next layer sums
    normal: bool = False  # whether units are normal and all alike, as an activation needs

    def each(self, change: Callable[[Block], Block], **changes: Any) -> State:
        """The same change of all three."""
        left = change(self.left)
        right = left if self.right is self.left else change(self.right)
        cross = left if self.cross is self.left else change(self.cross)
        return replace(self, cross=cross, left=left, right=right, **changes)


def all_pairs(left: Tensor, right: Tensor, full: bool) -> State:
    """The state at the inputs of all pairs of rows."""
    own = [_products(each, each, full, paired=True) for each in (left, right)]
    cross = _products(left, right, full, paired=False)
    return State(cross, own[0], own[1], units=left.shape[1])


def own_pairs(x: Tensor, full: bool) -> State:
    """The state at the inputs of rows with themselves."""
    own = _products(x, x, full, paired=True)
    return State(own, own, own, units=x.shape[1])


def _products(left: Tensor, right: Tensor, full: bool, *, paired: bool) -> Block:
    places = tuple(left.shape[2:])
    a, b = left.flatten(2) if places else left, right.flatten(2) if places else right
    rows = "n" if paired else "m"
    one, two, out = ("p", "q", "pq") if full else ("p", "p", "p") if places else ("", "", "")
    found = torch.einsum(f"nc{one},{rows}c{two}->{'n' if paired else 'nm'}{out}", a, b) / left.shape[1]
    lead = found.shape[: 1 if paired else 2]
    return Block(found.reshape(*lead, *places * (2 if full else 1)), None, places, full)


class Layer:
    """One step of the recursion."""

    def __call__(self, state: State, variances: Params, tangent: bool) -> State:
        raise NotImplementedError


@dataclass(frozen=True)
class Window:
    """Positions that a convolution or a pooling sees at once, of each dimension of an image."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # before and after
    dilation: tuple[int, ...]

    def offsets(self, values: Tensor, dims: list[int]) -> Iterator[Tensor]:
        """``values`` at each offset of the window, zero beyond the edges.

        ``dims`` are those of the positions, once or twice; where twice, both have the same offset.
        """
        n, end = len(self.size), values.dim()
        pads = [0] * (2 * end)
        for place, dim in enumerate(dims):
            before, after = self.padding[place % n]
            pads[2 * (end - 1 - dim)], pads[2 * (end - 1 - dim) + 1] = before, after
        padded = F.pad(values, pads)
        for at in itertools.product(*map(range, self.size)):
            part = padded
            for place, dim in enumerate(dims):
                axis = place % n
                first, count = at[axis] * self.dilation[axis], self.places(values.shape[dim], axis)
                part = part.narrow(dim, first, (count - 1) * self.stride[axis] + 1)
                part = part[(slice(None),) * dim + (slice(None, None, self.stride[axis]),)]
            yield part

    def places(self, size: int, axis: int) -> int:
        """How many positions there are behind, of ``size`` before."""
        reach = self.dilation[axis] * (self.size[axis] - 1) + 1
        return (size + sum(self.padding[axis]) - reach) // self.stride[axis] + 1

    def after(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """The positions behind it."""
        return tuple(self.places(size, axis) for axis, size in enumerate(places))

    @property
    def sizes(self) -> int:
        """How many offsets it has."""
        return math.prod(self.size)


def _dims(block: Block, values: Tensor) -> list[int]:
    return list(range(values.dim() - block.copies * len(block.places), values.dim()))


@dataclass(frozen=True)
class Weights(Layer):
    """A linear layer or a convolution."""

    path: str
    units: int  # outputs or channels
    weight: str  # names of its parameters
    bias: str | None
    window: Window | None

    def __call__(self, state: State, variances: Params, tangent: bool) -> State:
        scale = variances[self.weight] * state.units
        offset = torch.zeros_like(scale) if self.bias is None else variances[self.bias]
        if (self.window is None) != (not state.cross.places):
            raise Unsupported(
                f"Layer {self.path!r} acts on the last of several dimensions. Put nn.Flatten() before it."
            )

        def change(block: Block) -> Block:
            summed = block.each(lambda values: scale * self._summed(block, values), self._places(block))
            kernel = summed.kernel + offset
            if not tangent:
                return replace(summed, kernel=kernel)
            return replace(summed, kernel=kernel, tangent=kernel if summed.tangent is None else kernel + summed.tangent)

        return state.each(change, units=self.units, normal=True)

    def _places(self, block: Block) -> tuple[int, ...]:
        return self.window.after(block.places) if self.window else ()

    def _summed(self, block: Block, values: Tensor) -> Tensor:
        if self.window is None:
            return values
        parts = self.window.offsets(values, _dims(block, values))
        total = next(parts)
        for part in parts:
            total = total + part
        return total


@dataclass(frozen=True)
class Activation(Layer):
    """An activation of normal units."""

    dual: DualActivation
    path: str

    def __call__(self, state: State, variances: Params, tangent: bool) -> State:
        if not state.normal:
            raise Unsupported(
                f"Activation {self.path!r} must come directly behind a linear layer or a convolution, or a sum or "
                f"average of such."
            )
        one, two = self._variances(state.left), self._variances(state.right)
        paired = state.cross is state.left  # rows with themselves alone
        a, b = (one[0], one[1]) if paired else (one[0].unsqueeze(1), two[1].unsqueeze(0))
        left = self._through(state.left, *one, tangent)
        right = left if state.right is state.left else self._through(state.right, *two, tangent)
        cross = left if paired else self._through(state.cross, a, b, tangent)
        return replace(state, cross=cross, left=left, right=right, normal=False)

    def _through(self, block: Block, a: Tensor, b: Tensor, tangent: bool) -> Block:
        kernel = self.dual.covariance(a, b, block.kernel)
        if not tangent:
            return replace(block, kernel=kernel)
        assert block.tangent is not None  # behind a layer with weights
        return replace(block, kernel=kernel, tangent=self.dual.derivative(a, b, block.kernel) * block.tangent)

    @staticmethod
    def _variances(block: Block) -> tuple[Tensor, Tensor]:
        """Variances of each row's positions, which broadcast against covariances: as the first, as the second."""
        if not block.full:
            return block.kernel, block.kernel
        count = len(block.places)
        flat = block.kernel.reshape(len(block.kernel), math.prod(block.places), -1)
        own = flat.diagonal(dim1=1, dim2=2)
        ones = (1,) * count
        return own.reshape(-1, *block.places, *ones), own.reshape(-1, *ones, *block.places)


@dataclass(frozen=True)
class Mean(Layer):
    """Average pooling: over windows, or over all positions (None)."""

    window: Window | None

    def __call__(self, state: State, variances: Params, tangent: bool) -> State:
        window = self.window

        def change(block: Block) -> Block:
            count = len(block.places)
            if not block.places:
                raise Unsupported("Pooling needs positions: inputs (rows, channels, height, width).")
            places = window.after(block.places) if window else (1,) * count

            def pooled(values: Tensor) -> Tensor:
                dims = _dims(block, values)
                for some in (dims[:count], dims[count:]):
                    if window is None:
                        values = values.mean(some, keepdim=True)
                    else:
                        values = torch.stack(list(window.offsets(values, some))).sum(0) / window.sizes
                return values

            return block.each(pooled, places)

        return state.each(change)  # means of normal units are normal


@dataclass(frozen=True)
class Flatten(Layer):
    """Positions become units of their own."""

    def __call__(self, state: State, variances: Params, tangent: bool) -> State:
        count = math.prod(state.cross.places)

        def change(block: Block) -> Block:
            def own(values: Tensor) -> Tensor:
                lead = values.shape[: values.dim() - block.copies * len(block.places)]
                if not block.full:
                    return values.reshape(*lead, -1).mean(-1)
                return values.reshape(*lead, count, count).diagonal(dim1=-2, dim2=-1).mean(-1)

            return block.each(own, (), full=False) if block.places else block

        return state.each(change, units=state.units * count, normal=False if state.cross.places else state.normal)


@dataclass(frozen=True)
class Sum(Layer):
    """The input of some layers plus their output, which is independent of it given what their last weights are."""

    layers: list[Layer]
    path: str

    def __call__(self, state: State, variances: Params, tangent: bool) -> State:
        if not self.layers or not isinstance(self.layers[-1], Weights):
            raise Unsupported(
                f"The layers of Residual {self.path!r} must end in a linear layer or a convolution: only then is their "
                f"output independent of their input."
            )
        inner = state
        for layer in self.layers:
            inner = layer(inner, variances, tangent)

        def plus(one: Block, two: Block) -> Block:
            both = [each for each in (one.tangent, two.tangent) if each is not None]
            return replace(one, kernel=one.kernel + two.kernel, tangent=sum(both[1:], both[0]) if both else None)

        left = plus(state.left, inner.left)
        right = left if state.right is state.left else plus(state.right, inner.right)
        cross = left if state.cross is state.left else plus(state.cross, inner.cross)
        return replace(state, cross=cross, left=left, right=right)
