"""Which parameters of a network act as weight matrices, and where their rows of data are to be found.

A few rows are recorded once. A parameter belongs to a layer if all it does is seen in the recording as one weight
matrix or one bias; every other parameter (of a normalisation, an embedding, weights tied across kinds of layers) is
treated as a plain vector. In each use, the position of the rows of data is found by asking which entries a single row's
output depends on: recurrent and attention layers keep rows in other places than the first dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Params
from knowable.errors import Unsupported
from knowable.inference.laplace.weight_uses import Recording

_PROBED = 3  # rows


@dataclass(frozen=True)
class RowAxis:
    """Where the rows of data are among the dimensions in front of the features.

    Attributes:
        dim: The dimension.
        inner: Whether rows run fastest there (positions first), where it holds rows and positions together.
    """

    dim: int
    inner: bool

    def rows_first(self, values: Tensor, rows: int, *, lead: int = 0) -> Tensor:
        """``(..., features)`` as ``(rows, positions, features)``, behind ``lead`` dimensions that stay."""
        values = values.movedim(self.dim + lead, lead)
        sizes = (-1, rows) if self.inner else (rows, -1)
        values = values.unflatten(lead, sizes)
        return (values.movedim(lead + 1, lead) if self.inner else values).flatten(lead + 1, -2)


@dataclass(frozen=True)
class Layer:
    """A weight matrix with its bias, or one of the two.

    Attributes:
        names: The parameters: weight, bias, or both in this order.
        shapes: Their shapes.
        uses: Numbers of its uses in a recording.
        positions: How often it acts on one row: places in an image, steps of a sequence, uses.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    uses: tuple[int, ...]
    positions: int = 1

    @property
    def out(self) -> int:
        """Number of outputs: rows of the matrix."""
        return self.shapes[0][0]

    @property
    def width(self) -> int:
        """Number of inputs, the constant for the bias included: columns of the matrix."""
        return sum(shape.numel() for shape in self.shapes) // self.out


@dataclass(frozen=True)
class Anatomy:
    """The layers of a network, and its other parameters.

    Attributes:
        names: All parameters asked about.
        layers: Weight matrices, all of whose uses are noted in a recording.
        others: Parameters that are something else.
        axes: Where each use has its rows; a recording of any number of rows has the same uses in the same order.
        one_by_one: Whether directions of the outputs are better followed back one at a time.
    """

    names: tuple[str, ...]
    layers: tuple[Layer, ...]
    others: tuple[str, ...]
    axes: tuple[RowAxis, ...]
    one_by_one: bool = False

    @classmethod
    def of(cls, model: Model, names: tuple[str, ...], params: Params, x: Tensor, buffers: Buffers) -> Anatomy:
        """Look at the network on a few rows of ``x``."""
        rows = x[torch.arange(_PROBED, device=x.device) % len(x)]
        recording = Recording(model, names, params, rows, buffers)
        axes = _row_axes(recording)
        layers = tuple(_layers(recording, params, axes))
        held = {name for layer in layers for name in layer.names}
        others = tuple(name for name in names if name not in held)
        return cls(names, layers, others, axes, recording.convolves)

    @property
    def is_one_layer(self) -> bool:
        """Whether a single weight matrix is all there is."""
        return len(self.layers) == 1 and not self.others

    def activations(self, recording: Recording, layer: Layer, rows: int) -> Tensor:
        """What the layer's matrix is multiplied with, ``(rows, positions, in)``; its uses are positions too."""
        found = [self.axes[use].rows_first(recording.uses[use].activations(), rows) for use in layer.uses]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def gradients(self, found: list[Tensor], layer: Layer, rows: int) -> Tensor:
        """Of the gradients at all uses those of the layer, ``(K, rows, positions, out)``."""
        own = [self.axes[use].rows_first(found[use], rows, lead=1) for use in layer.uses]
        return own[0] if len(own) == 1 else torch.cat(own, dim=2)

    def is_head(self, recording: Recording, layer: Layer) -> bool:
        """Whether the layer's output, and nothing but it, is the network's output."""
        return len(layer.uses) == 1 and recording.is_output(recording.uses[layer.uses[0]])


def _layers(recording: Recording, params: Params, axes: tuple[RowAxis, ...]) -> Iterator[Layer]:
    unnoted = recording.unnoted()
    pairs: dict[tuple[str, ...], list[int]] = {}
    for number, use in enumerate(recording.uses):
        pairs.setdefault(use.names, []).append(number)
    for names, uses in pairs.items():
        alone = all(sum(name in other for other in pairs) == 1 for name in names)
        if alone and not unnoted.intersection(names):
            shapes = tuple(params[name].shape for name in names)
            yield Layer(names, shapes, tuple(uses), sum(_positions(recording, use, axes) for use in uses))


def _positions(recording: Recording, use: int, axes: tuple[RowAxis, ...]) -> int:
    output = recording.uses[use]
    return axes[use].rows_first(output.in_front(output.output), _PROBED).shape[1]


def _row_axes(recording: Recording) -> tuple[RowAxis, ...]:
    """The first place that fits each use: entries that belong to other rows must have no gradient at all."""
    found = []
    for use, masks in zip(recording.uses, _touched(recording), strict=True):
        fitting = (axis for axis in _candidates(masks.shape[1:]) if _fits(axis, masks))
        axis = next(fitting, None)
        if axis is None:
            raise Unsupported(
                f"Laplace needs rows that do not influence each other, but in the network's use of "
                f"{' and '.join(use.names)} they do. In evaluation mode each row must be computed by itself."
            )
        found.append(axis)
    return tuple(found)


def _touched(recording: Recording) -> list[Tensor]:
    """For each use: the entries, in front of the features, that the output of each row depends on, ``(rows, ...)``."""
    output = recording.output
    generator = torch.Generator(device=output.device).manual_seed(0)
    directions = output.new_zeros((_PROBED, *output.shape))
    for row in range(_PROBED):
        directions[row, row] = torch.randn(
            output.shape[1:], generator=generator, dtype=output.dtype, device=output.device
        )
    return [gradient.ne(0).any(-1) for gradient in recording.gradients(directions)]


def _candidates(shape: torch.Size) -> Iterator[RowAxis]:
    """Dimensions of just the rows first, then such that hold rows and positions together."""
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
