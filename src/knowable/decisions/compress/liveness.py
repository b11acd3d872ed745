"""Which units are needed: those from which a way leads to the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from knowable.decisions.compress.graph import Concatenate, Constants, Join, Layer, Merge, Move, Operation, Pass
from knowable.decisions.compress.module_operations import TRANSPOSED
from knowable.decisions.compress.surgery import LayerWeights
from knowable.decisions.compress.wiring import Wiring


@dataclass(frozen=True)
class Liveness:
    """Which units stay.

    Attributes:
        needed: Units that reach the output, ``(units,)``.
        fillers: Units that stay only because a tensor must have one, ``(units,)``: nothing flows through them.
    """

    needed: Tensor
    fillers: Tensor

    @property
    def kept(self) -> Tensor:
        """Units that are still there afterwards."""
        return self.needed | self.fillers


def find_living(wiring: Wiring, weights: Mapping[str, LayerWeights], constants: Mapping[Node, Constants]) -> Liveness:
    """Mark backward from what must stay, again and again until nothing changes.

    An output that is needed needs the inputs it reads, unless they are constants that its bias can take up. Units that
    are joined by a sum or product are needed together.
    """
    roots = wiring.roots()
    needed = wiring.pinned()
    while True:
        before = needed.clone()
        for node, layer in reversed(wiring.layers()):
            _mark(wiring, node, layer, weights[layer.path], constants, needed)
            needed = _together(needed, roots)
        if torch.equal(before, needed):
            return Liveness(needed, _fillers(wiring, needed, roots))


def _mark(
    wiring: Wiring,
    node: Node,
    layer: Layer,
    weights: LayerWeights,
    constants: Mapping[Node, Constants],
    needed: Tensor,
) -> None:
    if node not in wiring.inputs:
        return
    inputs = constant_inputs(node, layer, wiring, constants, weights.reads.shape[1])
    outputs = needed[wiring.wires[node].units]
    read = weights.reads[outputs].any(0) & weights.foldable(inputs).isnan()
    needed[wiring.inputs[node].units[read]] = True


def _together(needed: Tensor, roots: Tensor) -> Tensor:
    """Whatever is joined with a needed unit is needed."""
    found = torch.zeros_like(needed)
    found[roots[needed]] = True
    return found[roots]


def _fillers(wiring: Wiring, needed: Tensor, roots: Tensor) -> Tensor:
    fillers = torch.zeros_like(needed)
    for wires in wiring.wires.values():
        if len(wires.units) and not (needed | fillers)[wires.units].any():
            fillers |= roots == roots[wires.units[0]]
    return fillers


# --- Which units are the same for every input: a neuron that reads nothing, and what follows from it -----------------


def find_constants(wiring: Wiring, weights: Mapping[str, LayerWeights]) -> dict[Node, Constants]:
    """The constants of every tensor whose units are known, ``(count,)`` each, NaN for units that are not constant.

    One walk from input to output is enough: a unit is constant if all it reads is constant or has weight zero, and what
    it reads has been visited before.

    Args:
        wiring: The units.
        weights: The weights of every layer, by path.
    """
    found: dict[Node, Constants] = {}
    for node, operation in wiring.operations.items():
        if node in wiring.wires:
            values = _after(wiring, operation, node, found, weights)
            found[node] = torch.full_like(values, torch.nan) if node in wiring.tainted else values
    return found


def _after(
    wiring: Wiring,
    operation: Operation,
    node: Node,
    found: Mapping[Node, Constants],
    weights: Mapping[str, LayerWeights],
) -> Constants:
    match operation:
        case Layer():
            layer = weights[operation.path]
            return layer.constants(constant_inputs(node, operation, wiring, found, layer.reads.shape[1]))
        case Pass():
            return operation.constant(found[operation.source])
        case Join():
            return operation.combine(*(found[source] for source in operation.sources))
        case Concatenate():
            return torch.cat([_of(wiring, source, operation.dim, found) for source in operation.sources])
        case Merge():
            return _merged(wiring, operation, node, found)
        case Move():
            return found[operation.source]
    raise AssertionError(f"{operation} has wires")


def constant_inputs(node: Node, layer: Layer, wiring: Wiring, found: Mapping[Node, Constants], count: int) -> Constants:
    """The constants a layer reads, ``(count,)``; all unknown if the units of its input are not known."""
    return found[layer.source] if node in wiring.inputs else _unknown(count)


def _of(wiring: Wiring, source: Node, dim: int, found: Mapping[Node, Constants]) -> Constants:
    return found[source] if source in found else _unknown(source.meta["shape"][dim])


def _merged(wiring: Wiring, operation: Merge, node: Node, found: Mapping[Node, Constants]) -> Constants:
    values, units = found[operation.source], wiring.wires[operation.source]
    if len(values) == len(wiring.wires[node].units):
        return values
    block = operation.source.meta["shape"][operation.start : operation.end + 1]
    places = [1] * len(block)
    places[units.dim - operation.start] = -1
    return values.view(places).expand(block).flatten()


def _unknown(count: int) -> Constants:
    return torch.full((count,), torch.nan, dtype=torch.double)


# --- Constant channels before padded convolutions: many of them become one -------------------------------------------
#
# Where a convolution pads with zeros, a channel that has the value c everywhere is c inside and 0 beyond the border: no
# bias can take its place. But all such channels have the same shape, so one of them can carry the others, with the
# weights
#
# .. math:: w'_{o1} = \sum_i \frac{c_i}{c_1} w_{oi} .


@dataclass(frozen=True)
class _Read:
    """A layer's input that is a constant other than zero: at this place, with this value."""

    path: str
    place: int
    value: float


def carry_constants(
    wiring: Wiring, weights: dict[str, LayerWeights], constants: Mapping[Node, Constants], living: Liveness
) -> Liveness:
    """Let one constant channel stand for all that are read by the same layers; those layers are changed in place.

    Args:
        wiring: The units.
        weights: The weights of every layer, by path; renewed for the layers that change.
        constants: The constants.
        living: Which units are needed.

    Returns:
        The same without the units that are carried by others.
    """
    groups: dict[tuple[str, ...], list[list[_Read]]] = {}
    owner: dict[int, int] = {}  # of a list of reads, by its identity: the unit
    for unit, reads in _constant_reads(wiring, weights, constants, living).items():
        groups.setdefault(tuple(read.path for read in reads), []).append(reads)
        owner[id(reads)] = unit
    needed, roots = living.needed.clone(), wiring.roots()
    for paths, members in groups.items():
        carrier = max(members, key=lambda reads: min(abs(read.value) for read in reads))
        for reads in members:
            if reads is not carrier:
                _move(wiring.module, carrier, reads)
                needed &= roots != owner[id(reads)]
        if len(members) > 1:
            weights.update({path: LayerWeights.of(wiring.module.get_submodule(path)) for path in paths})
    return Liveness(needed, living.fillers)


def _constant_reads(
    wiring: Wiring, weights: Mapping[str, LayerWeights], constants: Mapping[Node, Constants], living: Liveness
) -> dict[int, list[_Read]]:
    """Where units (by their roots) are read that are needed for their constant values alone."""
    roots, pinned = wiring.roots(), wiring.pinned()
    found: dict[int, list[_Read]] = {}
    varying = set(roots[pinned].tolist())
    for node, layer in wiring.layers():
        if node not in wiring.inputs:
            continue
        units, weight = roots[wiring.inputs[node].units], weights[layer.path]
        inputs = constant_inputs(node, layer, wiring, constants, len(units))
        read = weight.reads[living.needed[wiring.wires[node].units]].any(0) & weight.foldable(inputs).isnan()
        varying.update(units[read & inputs.isnan()].tolist())
        for place in (read & ~inputs.isnan()).nonzero().flatten().tolist():
            found.setdefault(int(units[place]), []).append(_Read(layer.path, place, float(inputs[place])))
    return {
        unit: reads
        for unit, reads in found.items()
        if unit not in varying and len({read.path for read in reads}) == len(reads)
    }


@torch.no_grad()
def _move(module: nn.Module, carrier: list[_Read], reads: list[_Read]) -> None:
    for one, other in zip(carrier, reads, strict=True):
        layer: Any = module.get_submodule(one.path)
        weight = layer.weight
        weight = weight.transpose(0, 1) if type(layer) in TRANSPOSED else weight
        weight[:, one.place] += other.value / one.value * weight[:, other.place]
        weight[:, other.place] = 0.0
