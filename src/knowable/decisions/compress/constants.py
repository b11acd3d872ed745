"""Which units are the same for every input: a neuron that reads nothing, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from knowable.decisions.compress.layer_weights import LayerWeights
from knowable.decisions.compress.operations import Concatenate, Constants, Join, Layer, Merge, Move, Operation, Pass
from knowable.decisions.compress.wiring import Wiring


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
