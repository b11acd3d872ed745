"""Which units flow where: every channel or feature of every tensor gets the number of the unit it is.

Tensors that are added share their units: a channel can only be removed from both. Units that something needs which is
not understood here (an unknown layer, the network's output) are pinned, and stay.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from knowable.decisions.compress.function_operations import function_operation, merge
from knowable.decisions.compress.graph import (
    Ask,
    Concatenate,
    Join,
    Layer,
    Merge,
    Move,
    Opaque,
    Operation,
    Pass,
    asks_about_units,
    changed_in_place,
    shape_of,
)
from knowable.decisions.compress.module_operations import Uses, module_operation


@dataclass(frozen=True)
class Wires:
    """The units of a tensor: they lie along dimension ``dim``, and ``units`` has the number of each, ``(count,)``."""

    dim: int
    units: Tensor


@dataclass
class Wiring:
    """The units of a network's graph.

    Attributes:
        module: The traced network.
        operations: What each node does.
        wires: The units of each tensor that is understood. Numbers are raw: see :meth:`roots`.
        inputs: The units each layer reads, by the layer's node; it is not here if they are not known.
        tainted: Nodes whose values change under later readers, by an operation in place.
        notes: What was left alone, in words.
    """

    module: fx.GraphModule
    operations: dict[Node, Operation] = field(default_factory=dict)
    wires: dict[Node, Wires] = field(default_factory=dict)
    inputs: dict[Node, Wires] = field(default_factory=dict)
    tainted: set[Node] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    _parents: list[int] = field(default_factory=list)
    _pinned: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, module: fx.GraphModule) -> Wiring:
        """Wire a graph whose shapes are known (see :func:`knowable.decisions.compress.graph.record_shapes`)."""
        made, uses = cls(module), Uses(module)
        for node in module.graph.nodes:
            made.operations[node] = _operation(node, uses)
        made.tainted = changed_in_place(made.module, made.operations)
        for node, operation in made.operations.items():
            made._wire(node, operation)
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

    def layers(self) -> list[tuple[Node, Layer]]:
        """All layers, first to last."""
        return [(node, each) for node, each in self.operations.items() if isinstance(each, Layer)]

    # --- one node ----------------------------------------------------------------------------------------------------

    def _wire(self, node: Node, operation: Operation) -> None:
        if isinstance(operation, Ask):
            if operation.source in self.wires and asks_about_units(
                node, self.wires[operation.source].dim, self.operations
            ):
                self._pin(operation.source)
            return
        made = self._understood(node, operation)
        if made is not None:
            self.wires[node] = made
            return
        if isinstance(operation, Opaque) and operation.why:
            self.notes.append(operation.why)
        for source in node.all_input_nodes:
            self._pin(source)

    def _understood(self, node: Node, operation: Operation) -> Wires | None:
        match operation:
            case Layer():
                return self._through_layer(node, operation)
            case Pass():
                return self._through_pass(operation)
            case Join():
                return self._joined(operation)
            case Concatenate():
                return self._concatenated(operation)
            case Merge():
                return self._merged(operation)
            case Move():
                return self._moved(operation)
        return None

    def _through_layer(self, node: Node, operation: Layer) -> Wires:
        ndim = self.module.get_parameter(f"{operation.path}.weight").dim()
        shape, source = shape_of(node) or (), self.wires.get(operation.source)
        dim = len(shape) - 1 if ndim == 2 else 1
        batched = ndim == 2 or len(shape) == ndim
        if source is not None and source.dim == dim and batched:
            self.inputs[node] = source
        else:
            self._pin(operation.source)
        return Wires(dim, self._new(shape[dim]) if batched else self._fixed(shape[dim]))

    def _through_pass(self, operation: Pass) -> Wires | None:
        source = self.wires.get(operation.source)
        if source is None or operation.dim not in (None, source.dim):
            return None
        fits = operation.ndim in (None, len(shape_of(operation.source) or ()))
        return source if fits else None

    def _joined(self, operation: Join) -> Wires | None:
        left, right = (self.wires.get(source) for source in operation.sources)
        ndims = {len(shape_of(source) or ()) for source in operation.sources}
        if left is None or right is None or left.dim != right.dim or len(ndims) > 1:
            return None
        if len(left.units) != len(right.units):
            return None
        for one, other in zip(left.units.tolist(), right.units.tolist(), strict=True):
            self._parents[self._root(one)] = self._root(other)
        return left

    def _concatenated(self, operation: Concatenate) -> Wires | None:
        found = [self.wires.get(source) for source in operation.sources]
        if all(each is None for each in found) or any(each and each.dim != operation.dim for each in found):
            return None
        parts = [
            each.units if each is not None else self._fixed((shape_of(source) or ())[operation.dim])
            for source, each in zip(operation.sources, found, strict=True)
        ]
        return Wires(operation.dim, torch.cat(parts))

    def _merged(self, operation: Merge) -> Wires | None:
        source, shape = self.wires.get(operation.source), shape_of(operation.source) or ()
        start, end = operation.start, operation.end
        if source is None:
            return None
        if not start <= source.dim <= end:
            return Wires(source.dim if source.dim < start else source.dim - (end - start), source.units)
        block = shape[start : end + 1]
        places = [1] * len(block)
        places[source.dim - start] = -1
        return Wires(start, source.units.view(places).expand(block).flatten())

    def _moved(self, operation: Move) -> Wires | None:
        source = self.wires.get(operation.source)
        if source is None or source.dim not in operation.order:
            return None
        return Wires(operation.order.index(source.dim), source.units)

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
        if node in self.wires:
            self._pinned.update(self.wires[node].units.tolist())

    def _root(self, unit: int) -> int:
        while self._parents[unit] != unit:
            self._parents[unit] = self._parents[self._parents[unit]]
            unit = self._parents[unit]
        return unit


def _operation(node: Node, uses: Uses) -> Operation:
    if node.op == "call_module":
        return _flattening(node, uses) or module_operation(node, uses)
    if node.op in ("call_function", "call_method") and not (node.target is operator.getitem and shape_of(node) is None):
        return function_operation(node)
    return Opaque(tuple(node.all_input_nodes))  # the input, the output, parameters by name, parts of shapes


def _flattening(node: Node, uses: Uses) -> Merge | None:
    return merge(node, node.all_input_nodes[0], None) if type(uses.of(node)) is nn.Flatten else None
