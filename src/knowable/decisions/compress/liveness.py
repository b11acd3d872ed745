"""Liveness analysis: which units are the same for every input, and which units the output depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from knowable.decisions.compress.dependencies import UnitDependencies, flattened
from knowable.decisions.compress.graph import (
    BinaryOp,
    ConcatOp,
    Constants,
    FlattenOp,
    LayerOp,
    PermuteOp,
    UnitwiseOp,
    shape_of,
)
from knowable.decisions.compress.node_operations import TRANSPOSED
from knowable.decisions.compress.surgery import LayerWeights


@dataclass
class NetworkAnalysis:
    """What is known about a traced network before units are removed."""

    dependencies: UnitDependencies
    weights: dict[str, LayerWeights]  # by path
    constants: dict[Node, Constants] = field(default_factory=dict)  # (count,), where the units are known

    @classmethod
    def of(cls, module: fx.GraphModule) -> NetworkAnalysis:
        """Analyse a graph whose shapes are recorded.

        One walk from input to output finds all constants: a unit is constant if all it reads is constant or has weight
        zero, and what it reads has been visited before.
        """
        dependencies = UnitDependencies.of(module)
        paths = [layer.path for _, layer in dependencies.layers()]
        made = cls(dependencies, {path: LayerWeights.of(module.get_submodule(path)) for path in paths})
        for node in dependencies.units_of:
            values = made._constants_of(node)
            made.constants[node] = torch.full_like(values, torch.nan) if node in dependencies.overwritten else values
        return made

    def constant_inputs(self, node: Node, layer: LayerOp) -> Constants:
        """The constants a layer reads, ``(inputs,)``; all NaN if the units of its input are not known."""
        if node in self.dependencies.inputs:
            return self.constants[layer.source]
        return _unknown(self.weights[layer.path].reads.shape[1])

    def read_inputs(self, node: Node, layer: LayerOp, needed: Tensor) -> tuple[Tensor, Constants]:
        """Which inputs the needed outputs of a layer read and its bias cannot replace, and the constants it reads."""
        weights, inputs = self.weights[layer.path], self.constant_inputs(node, layer)
        outputs = needed[self.dependencies.units_of[node].units]
        return weights.reads[outputs].any(0) & weights.foldable(inputs).isnan(), inputs

    def _constants_of(self, node: Node) -> Constants:
        match operation := self.dependencies.operations[node]:
            case LayerOp():
                return self.weights[operation.path].constants(self.constant_inputs(node, operation))
            case UnitwiseOp():
                return operation.constant(self.constants[operation.source])
            case BinaryOp():
                return operation.combine(*(self.constants[source] for source in operation.sources))
            case ConcatOp():
                sizes = {source: (shape_of(source) or ())[operation.dim] for source in operation.sources}
                return torch.cat([self.constants.get(each, _unknown(sizes[each])) for each in operation.sources])
            case FlattenOp():
                dim = self.dependencies.units_of[operation.source].dim
                return flattened(self.constants[operation.source], dim, operation)
            case PermuteOp():
                return self.constants[operation.source]
        raise AssertionError(f"{operation} has units")


def _unknown(count: int) -> Constants:
    return torch.full((count,), torch.nan, dtype=torch.double)


# --- which units are needed ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Liveness:
    """Which units stay, ``(units,)`` each."""

    needed: Tensor  # the output depends on them
    placeholders: Tensor  # stay only because a tensor must have at least one unit; their value is unused

    @property
    def kept(self) -> Tensor:
        """Units that are still there afterwards."""
        return self.needed | self.placeholders


def find_living(analysis: NetworkAnalysis) -> Liveness:
    """Mark units backward from those that must stay, until nothing changes.

    An output that is needed needs the inputs it reads, unless they are constants that the bias can absorb. Units that
    are joined by a sum or product are needed together.
    """
    dependencies = analysis.dependencies
    roots, needed = dependencies.roots(), dependencies.pinned()
    while True:
        before = needed.clone()
        for node, layer in reversed(dependencies.layers()):
            if node in dependencies.inputs:
                read, _ = analysis.read_inputs(node, layer, needed)
                needed[dependencies.inputs[node].units[read]] = True
            joined = torch.zeros_like(needed)
            joined[roots[needed]] = True
            needed = joined[roots]
        if torch.equal(before, needed):
            return Liveness(needed, _placeholders(dependencies, needed, roots))


def _placeholders(dependencies: UnitDependencies, needed: Tensor, roots: Tensor) -> Tensor:
    found = torch.zeros_like(needed)
    for each in dependencies.units_of.values():
        if len(each.units) and not (needed | found)[each.units].any():
            found |= roots == roots[each.units[0]]
    return found


# --- constant channels before padded convolutions: many of them become one -------------------------------------------


@dataclass(frozen=True)
class _ConstantRead:
    """A layer's input that is a constant other than zero: its index and its value."""

    path: str
    index: int
    value: float


def merge_constant_channels(analysis: NetworkAnalysis, living: Liveness) -> Liveness:
    r"""Let one constant channel represent all that are read by the same layers, whose weights are changed in place.

    Where a convolution pads with zeros, a channel that has the value c everywhere is c inside and 0 beyond the border:
    no bias can replace it. But all such channels have the same shape, so one of them can represent the others, with the
    weights :math:`w'_{o1} = \sum_i \frac{c_i}{c_1} w_{oi}`. Returns which units stay then.
    """
    module, roots, needed = analysis.dependencies.module, analysis.dependencies.roots(), living.needed.clone()
    groups: dict[tuple[str, ...], dict[int, list[_ConstantRead]]] = {}
    for unit, reads in _constant_reads(analysis, living).items():
        groups.setdefault(tuple(read.path for read in reads), {})[unit] = reads
    for paths, members in groups.items():
        chosen = max(members, key=lambda unit: min(abs(read.value) for read in members[unit]))
        for unit, reads in members.items():
            if unit != chosen:
                _add_weights(module, members[chosen], reads)
                needed &= roots != unit
        if len(members) > 1:
            analysis.weights.update({path: LayerWeights.of(module.get_submodule(path)) for path in paths})
    return Liveness(needed, living.placeholders)


def _constant_reads(analysis: NetworkAnalysis, living: Liveness) -> dict[int, list[_ConstantRead]]:
    """The reads of units (by their roots) that are needed for their constant values alone."""
    dependencies = analysis.dependencies
    roots = dependencies.roots()
    found: dict[int, list[_ConstantRead]] = {}
    varying = set(roots[dependencies.pinned()].tolist())
    for node, layer in dependencies.layers():
        if node not in dependencies.inputs:
            continue
        units = roots[dependencies.inputs[node].units]
        read, inputs = analysis.read_inputs(node, layer, living.needed)
        varying.update(units[read & inputs.isnan()].tolist())
        for index in (read & ~inputs.isnan()).nonzero().flatten().tolist():
            found.setdefault(int(units[index]), []).append(_ConstantRead(layer.path, index, float(inputs[index])))
    return {
        unit: reads
        for unit, reads in found.items()
        if unit not in varying and len({read.path for read in reads}) == len(reads)
    }


@torch.no_grad()
def _add_weights(module: nn.Module, chosen: list[_ConstantRead], reads: list[_ConstantRead]) -> None:
    for one, other in zip(chosen, reads, strict=True):
        layer: Any = module.get_submodule(one.path)
        weight = layer.weight
        weight = weight.transpose(0, 1) if type(layer) in TRANSPOSED else weight
        weight[:, one.index] += other.value / one.value * weight[:, other.index]
        weight[:, other.index] = 0.0
