r"""Constant channels before padded convolutions: many of them become one.

Where a convolution pads with zeros, a channel that has the value c everywhere is c inside and 0 beyond the border: no
bias can take its place. But all such channels have the same shape, so one of them can carry the others, with the
weights

.. math:: w'_{o1} = \sum_i \frac{c_i}{c_1} w_{oi} .
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from knowable.decisions.compress.constants import constant_inputs
from knowable.decisions.compress.layer_weights import LayerWeights
from knowable.decisions.compress.liveness import Liveness
from knowable.decisions.compress.module_operations import TRANSPOSED
from knowable.decisions.compress.operations import Constants
from knowable.decisions.compress.wiring import Wiring


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
