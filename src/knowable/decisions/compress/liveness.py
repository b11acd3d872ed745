"""Which units are needed: those from which a way leads to the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from knowable.decisions.compress.constants import constant_inputs
from knowable.decisions.compress.layer_weights import LayerWeights
from knowable.decisions.compress.operations import Constants, Layer
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
