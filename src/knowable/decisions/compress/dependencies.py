"""Which channels and features depend on each other: every one of every tensor gets the number of its unit.

Tensors that are added share their units: a channel can only be removed from both. Units that an unknown operation or
the network's output reads are pinned, and stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, fx
from torch.fx import Node

from knowable.decisions.compress.graph import (
    BinaryOp,
    ConcatOp,
    FlattenOp,
    LayerOp,
    OpaqueOp,
    Operation,
    PermuteOp,
    ShapeQuery,
    UnitwiseOp,
    asks_about_units,
    changed_in_place,
    shape_of,
)
from knowable.decisions.compress.node_operations import ModuleUses, node_operation


@dataclass(frozen=True)
class TensorUnits:
    """The units of a tensor: they lie along dimension ``dim``, and ``units`` has the number of each, ``(count,)``."""

    dim: int
    units: Tensor


@dataclass
class UnitDependencies:
    """The units of a network's graph, where they are known. Their numbers are raw: see :meth:`roots`."""

    module: fx.GraphModule
    operations: dict[Node, Operation] = field(default_factory=dict)
    units_of: dict[Node, TensorUnits] = field(default_factory=dict)
    inputs: dict[Node, TensorUnits] = field(default_factory=dict)  # the units each layer reads
    overwritten: set[Node] = field(default_factory=set)  # in place, before others read them
    notes: list[str] = field(default_factory=list)  # which layers were left as they are
    _parents: list[int] = field(default_factory=list)
    _pinned: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, module: fx.GraphModule) -> UnitDependencies:
        """Number the units of a graph whose shapes are recorded."""
        made, uses = cls(module), ModuleUses(module)
        for node in module.graph.nodes:
            made.operations[node] = node_operation(node, uses)
        made.overwritten = changed_in_place(made.module, made.operations)
        for node, operation in made.operations.items():
            made._add(node, operation)
        return made

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self._parents)

    def roots(self) -> Tensor:
        """For each unit the number that stands for all units joined with it, ``(count,)``."""
        return torch.tensor([self._root(unit) for unit in range(self.count)], dtype=torch.long)

    def pinned(self) -> Tensor:
        """Units that must stay, ``(count,)``."""
        roots = {self._root(unit) for unit in self._pinned}
        return torch.tensor([self._root(unit) in roots for unit in range(self.count)], dtype=torch.bool)

    def layers(self) -> list[tuple[Node, LayerOp]]:
        """All layers, first to last."""
        return [(node, each) for node, each in self.operations.items() if isinstance(each, LayerOp)]

    # --- one node ----------------------------------------------------------------------------------------------------

    def _add(self, node: Node, operation: Operation) -> None:
        if isinstance(operation, ShapeQuery):
            source = self.units_of.get(operation.source)
            if source is not None and asks_about_units(node, source.dim, self.operations):
                self._pin(operation.source)
            return
        units = self._units(node, operation)
        if units is not None:
            self.units_of[node] = units
            return
        if isinstance(operation, OpaqueOp) and operation.why:
            self.notes.append(operation.why)
        for source in node.all_input_nodes:
            self._pin(source)

    def _units(self, node: Node, operation: Operation) -> TensorUnits | None:
        match operation:
            case LayerOp():
                return self._through_layer(node, operation)
            case BinaryOp():
                return self._joined(operation)
            case ConcatOp():
                return self._concatenated(operation)
            case UnitwiseOp() | FlattenOp() | PermuteOp():
                source = self.units_of.get(operation.source)
                return None if source is None else _rearranged(operation, source)
        return None

    def _through_layer(self, node: Node, operation: LayerOp) -> TensorUnits:
        ndim = self.module.get_parameter(f"{operation.path}.weight").dim()
        shape, source = shape_of(node) or (), self.units_of.get(operation.source)
        dim = len(shape) - 1 if ndim == 2 else 1
        batched = ndim == 2 or len(shape) == ndim
        if source is not None and source.dim == dim and batched:
            self.inputs[node] = source
        else:
            self._pin(operation.source)
        return TensorUnits(dim, self._new(shape[dim]) if batched else self._fixed(shape[dim]))

    def _joined(self, operation: BinaryOp) -> TensorUnits | None:
        left, right = (self.units_of.get(source) for source in operation.sources)
        ndims = {len(shape_of(source) or ()) for source in operation.sources}
        if left is None or right is None or left.dim != right.dim or len(ndims) > 1:
            return None
        if len(left.units) != len(right.units):
            return None
        for one, other in zip(left.units.tolist(), right.units.tolist(), strict=True):
            self._parents[self._root(one)] = self._root(other)
        return left

    def _concatenated(self, operation: ConcatOp) -> TensorUnits | None:
        found = [self.units_of.get(source) for source in operation.sources]
        if all(each is None for each in found) or any(each and each.dim != operation.dim for each in found):
            return None
        parts = [
            each.units if each is not None else self._fixed((shape_of(source) or ())[operation.dim])
            for source, each in zip(operation.sources, found, strict=True)
        ]
        return TensorUnits(operation.dim, torch.cat(parts))

    # --- sets of units -----------------------------------------------------------------------------------------------

    def _new(self, count: int) -> Tensor:
        start = self.count
        self._parents += range(start, start + count)
        return torch.arange(start, start + count)

    def _fixed(self, count: int) -> Tensor:
        made = self._new(count)
        self._pinned.update(made.tolist())
        return made

    def _pin(self, node: Node) -> None:
        if node in self.units_of:
            self._pinned.update(self.units_of[node].units.tolist())

    def _root(self, unit: int) -> int:
        while self._parents[unit] != unit:
            self._parents[unit] = self._parents[self._parents[unit]]
            unit = self._parents[unit]
        return unit


def _rearranged(operation: UnitwiseOp | FlattenOp | PermuteOp, source: TensorUnits) -> TensorUnits | None:
    """The units of ``source`` after the operation; None if it does not keep them apart."""
    if isinstance(operation, UnitwiseOp):
        fits = operation.ndim in (None, len(shape_of(operation.source) or ()))
        return source if fits and operation.dim in (None, source.dim) else None
    if isinstance(operation, PermuteOp):
        known = source.dim in operation.order
        return TensorUnits(operation.order.index(source.dim), source.units) if known else None
    dim, merged = source.dim, operation.end - operation.start
    dim = dim - merged if dim > operation.end else min(dim, operation.start)
    return TensorUnits(dim, flattened(source.units, source.dim, operation))


def flattened(values: Tensor, dim: int, operation: FlattenOp) -> Tensor:
    """Values of the units along ``dim``, ``(count,)``, for the units after dimensions are merged."""
    if not operation.start <= dim <= operation.end:
        return values
    block = (shape_of(operation.source) or ())[operation.start : operation.end + 1]
    sizes = [1] * len(block)
    sizes[dim - operation.start] = -1
    return values.view(sizes).expand(block).flatten()
