"""Which parameters of a network act as weight matrices, and along which dimension each use has its rows of data.

A few rows are traced once. A parameter belongs to a layer if all its uses are seen in the trace as one weight matrix or
one bias; every other parameter (of a normalisation, an embedding, weights tied across kinds of layers) is treated as a
plain vector. In each use, the dimension of the rows is found by asking which entries a single row's output depends on:
recurrent and attention layers keep rows in other dimensions than the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Params, pack, unpack
from knowable.core.network.weight_uses import ForwardTrace
from knowable.errors import Unsupported

_PROBED = 3  # rows


@dataclass(frozen=True)
class RowAxis:
    """Which of the dimensions in front of the features is that of the rows of data."""

    dim: int  # the dimension
    inner: bool  # whether rows run fastest there (positions first), where it holds rows and positions together

    def rows_first(self, values: Tensor, rows: int, *, lead: int = 0) -> Tensor:
        """``(..., features)`` as ``(rows, positions, features)``, behind ``lead`` dimensions that stay."""
        values = values.movedim(self.dim + lead, lead)
        sizes = (-1, rows) if self.inner else (rows, -1)
        values = values.unflatten(lead, sizes)
        return (values.movedim(lead + 1, lead) if self.inner else values).flatten(lead + 1, -2)


@dataclass(frozen=True)
class Layer:
    """A weight matrix with its bias, or one of the two."""

    names: tuple[str, ...]  # the parameters: weight, bias, or both in this order
    shapes: tuple[torch.Size, ...]  # their shapes
    uses: tuple[int, ...]  # numbers of its uses in a trace
    positions: int = 1  # how often it acts on one row: positions in an image, steps of a sequence, uses
    transposed: bool = False  # whether the weight is held as (in, out)

    @property
    def out(self) -> int:
        """Number of outputs: rows of the matrix."""
        return self.shapes[0][-1 if self.transposed else 0]

    @property
    def width(self) -> int:
        """Number of inputs, the constant for the bias included: columns of the matrix."""
        return sum(shape.numel() for shape in self.shapes) // self.out

    def matrix(self, params: Params) -> Tensor:
        """The layer's parameters as matrices ``(..., out, in)``; leading dimensions are kept."""
        return pack(params, self.names, self.shapes, self.out, transposed=self.transposed)

    def params(self, matrix: Tensor) -> Params:
        """The inverse of :meth:`matrix`."""
        return unpack(matrix, self.names, self.shapes, transposed=self.transposed)


@dataclass(frozen=True)
class NetworkLayers:
    """The layers of a network, and its other parameters."""

    names: tuple[str, ...]  # all traced parameters
    noted: tuple[str, ...]  # those whose products with inputs are noted in a trace
    layers: tuple[Layer, ...]  # weight matrices, all of whose uses are noted in a trace
    others: tuple[str, ...]  # parameters that are something else
    axes: tuple[RowAxis, ...]  # where each use has its rows; traces of any number of rows have the same uses in order
    uses: tuple[tuple[str, ...], ...]  # the parameters of each use
    convolves: bool = False  # whether a layer is a convolution, whose backward pass is as quick direction by direction

    @classmethod
    def of(cls, network: Network, names: tuple[str, ...], params: Params, x: Tensor, buffers: Buffers) -> NetworkLayers:
        """Trace the network on a few rows of ``x``."""
        rows = x[torch.arange(_PROBED, device=x.device) % len(x)]
        trace, axes = _on_rows(network, names, params, rows, buffers)
        layers = tuple(_layers(trace, params, axes))
        held = {name for layer in layers for name in layer.names}
        others = tuple(name for name in names if name not in held)
        uses = tuple(use.names for use in trace.uses)
        return cls(names, trace.noted, layers, others, axes, uses, trace.convolves)

    def check(self, trace: ForwardTrace, rows: int) -> None:
        """Refuse a trace of other rows that uses the parameters in another way."""
        for number, use in enumerate(trace.uses):
            known = number < len(self.uses) and self.uses[number] == use.names
            if not known or use.in_front(use.output).shape[self.axes[number].dim] % rows:
                raise Unsupported(_routed(use.names))
        if len(trace.uses) < len(self.uses):
            raise Unsupported(_routed(self.uses[len(trace.uses)]))

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def only(self) -> Layer | None:
        """The layer, if a single one holds all parameters."""
        return self.layers[0] if len(self.layers) == 1 and not self.others else None


def _layers(trace: ForwardTrace, params: Params, axes: tuple[RowAxis, ...]) -> Iterator[Layer]:
    unnoted = trace.unnoted()
    pairs: dict[tuple[tuple[str, ...], bool], list[int]] = {}
    for number, use in enumerate(trace.uses):
        pairs.setdefault((use.names, use.transposed), []).append(number)
    for (names, transposed), uses in pairs.items():
        alone = all(sum(name in others for others, _ in pairs) == 1 for name in names)
        if alone and not unnoted.intersection(names):
            shapes = tuple(params[name].shape for name in names)
            yield Layer(names, shapes, tuple(uses), sum(_positions(trace, use, axes) for use in uses), transposed)


def _positions(trace: ForwardTrace, use: int, axes: tuple[RowAxis, ...]) -> int:
    output = trace.uses[use]
    return axes[use].rows_first(output.in_front(output.output), _PROBED).shape[1]


def _rows_are_independent(network: Network, params: Params, rows: Tensor, buffers: Buffers) -> bool:
    """Whether each row has the same output alone and beside others."""
    with torch.no_grad():
        together = network(params, rows, buffers=buffers)
        alone = torch.cat([network(params, rows[k : k + 1], buffers=buffers) for k in range(len(rows))])
    return torch.allclose(together, alone, rtol=1e-3, atol=1e-5)


def _routed(names: tuple[str, ...]) -> str:
    return (
        f"This method needs weights that act on every row, but {' and '.join(names)} act on some, as in a mixture of "
        f"experts that sends rows to different ones. Keep them out of the random ones, Model(..., random=[...]), or "
        f"use MeanFieldVI, SWAG or an ensemble."
    )


def _on_rows(
    network: Network, names: tuple[str, ...], params: Params, rows: Tensor, buffers: Buffers
) -> tuple[ForwardTrace, tuple[RowAxis, ...]]:
    """A trace that notes the products of weights with rows, but not those of weights with each other; and its axes."""
    noted = names
    while True:
        trace = ForwardTrace(network, names, params, rows, buffers, noted=noted, cut=True)
        axes = _row_axes(trace, lambda: _rows_are_independent(network, params, rows, buffers))
        apart = {name for use, axis in zip(trace.uses, axes, strict=True) if axis is None for name in use.names}
        if not apart:
            return trace, tuple(axis for axis in axes if axis is not None)
        noted = tuple(name for name in noted if name not in apart)


def _row_axes(trace: ForwardTrace, independent: Callable[[], bool]) -> list[RowAxis | None]:
    """The first axis that fits each use: entries that belong to other rows must have no gradient at all.

    None for a product ``x @ weight`` of something else than rows (of two weights, say).
    """
    found = []
    for use, masks in zip(trace.uses, _touched(trace), strict=True):
        fitting = (axis for axis in _candidates(masks.shape[1:]) if _fits(axis, masks))
        axis = next(fitting, None)
        if axis is None and not use.transposed and independent():
            raise Unsupported(_routed(use.names))
        if axis is None and not (use.transposed and independent()):
            raise Unsupported(
                f"This method needs rows that do not influence each other, but in the network's use of "
                f"{' and '.join(use.names)} they do. In evaluation mode each row must be computed by itself."
            )
        found.append(axis)
    return found


def _touched(trace: ForwardTrace) -> list[Tensor]:
    """For each use: the entries, in front of the features, that the output of each row depends on, ``(rows, ...)``."""
    output = trace.output
    generator = torch.Generator(device=output.device).manual_seed(0)
    directions = output.new_zeros((_PROBED, *output.shape))
    for row in range(_PROBED):
        directions[row, row] = torch.randn(
            output.shape[1:], generator=generator, dtype=output.dtype, device=output.device
        )
    return [gradient.ne(0).any(-1) for gradient in trace.gradients(directions)]


def _candidates(shape: torch.Size) -> Iterator[RowAxis]:
    """First the dimensions of just the rows, then those that hold rows and positions together."""
    whole = [dim for dim, size in enumerate(shape) if size == _PROBED]
    mixed = [dim for dim, size in enumerate(shape) if size % _PROBED == 0 and size != _PROBED]
    yield from (RowAxis(dim, False) for dim in whole)
    for dim in mixed:
        yield RowAxis(dim, False)
        yield RowAxis(dim, True)


def _fits(axis: RowAxis, masks: Tensor) -> bool:
    """Whether each row touches nothing but itself."""
    touched = axis.rows_first(masks.unsqueeze(-1), _PROBED, lead=1).flatten(2).any(2)  # (row, touched row)
    return not touched[~torch.eye(_PROBED, dtype=torch.bool, device=masks.device)].any()
