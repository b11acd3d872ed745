"""A network as a graph of operations, by torch.fx, with the shape of everything that flows through it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from knowable.core.network.gates import Gates

_ROWS = 2  # of the example, to learn shapes


def trace(net: nn.Module) -> fx.GraphModule | None:
    """The graph of ``net`` over its own modules (not copies), or None if torch.fx cannot trace its forward.

    Layers of ``torch.nn`` are nodes of the graph. A part of the network that cannot be traced (because it branches on
    values, for example) is one node too.
    """
    tracer = _LayerTracer()
    try:
        graph = tracer.trace(net)
    except Exception:  # a user's forward may raise anything when it is given a proxy
        return None
    module = fx.GraphModule(net, graph, class_name=type(net).__name__)
    graph.eliminate_dead_code()  # left over from parts that could not be traced
    return module


def record_shapes(module: fx.GraphModule, example: Tensor) -> None:
    """Put the shape of every tensor into ``node.meta["shape"]`` (None for what is not a tensor)."""
    with torch.no_grad():
        _Shapes(module).run(example[:_ROWS])


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """The shape found by :func:`record_shapes`."""
    return node.meta.get("shape")


class _LayerTracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Gates | ColumnSelection | ChannelShift) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


class _Shapes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        n.meta["shape"] = tuple(found.shape) if isinstance(found, Tensor) else None
        return found


# --- side effects of removing units: shapes that are read, values that are overwritten -------------------------------

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def asks_about_units(question: Node, dim: int, operations: Mapping[Node, Operation]) -> bool:
    """Whether ``x.size(1)`` or ``x.shape`` uses the number of units along ``dim`` for more than a flattening."""
    source = question.all_input_nodes[0]
    ndim = len(shape_of(source) or ())
    if question.op == "call_method":
        if question.target in ("dim", "ndimension"):
            return False
        if question.target == "numel":
            return _has_effect(question, operations)
        place = question.args[1] if len(question.args) > 1 else question.kwargs.get("dim")
        if isinstance(place, int):
            return place % ndim == dim and _has_effect(question, operations)
    elif question.args[1:2] != ("shape",):
        return question.args[1:2] not in (("ndim",), ("dtype",), ("device",))
    return any(_part_has_effect(user, ndim, dim, operations) for user in question.users)


def _part_has_effect(user: Node, ndim: int, dim: int, operations: Mapping[Node, Operation]) -> bool:
    """Whether the entries of a shape that ``user`` takes include ``dim`` and have an effect."""
    if user.target is not operator.getitem:
        return not isinstance(operations.get(user), FlattenOp)
    place: Any = user.args[1]
    taken = range(ndim)[place] if isinstance(place, int | slice) else range(ndim)
    asked = dim in taken if isinstance(taken, range) else taken == dim
    return asked and _has_effect(user, operations)


def _has_effect(size: Node, operations: Mapping[Node, Operation]) -> bool:
    """Whether a size is used for more than the sizes of views that amount to a flattening."""
    for user in size.users:
        if shape_of(user) is None:
            if user.op == "output" or _has_effect(user, operations):
                return True
        elif not isinstance(operations.get(user), FlattenOp):
            return True
    return False


def changed_in_place(module: fx.GraphModule, operations: Mapping[Node, Operation]) -> set[Node]:
    """Nodes whose values are overwritten in place while others still read them, and their views."""
    overwritten: set[Node] = set()
    for node in module.graph.nodes:
        here = node.all_input_nodes[0] if is_in_place(node, module) and node.all_input_nodes else None
        below = node
        while here is not None:
            if any(user is not below for user in here.users):
                overwritten.add(here)
            here, below = _source_of_view(operations.get(here)), here
    return overwritten


def is_in_place(node: Node, module: fx.GraphModule) -> bool:
    """Whether a node writes its result over its first operand."""
    if node.op == "call_module":
        return bool(getattr(module.get_submodule(str(node.target)), "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    flags = [value for value in (*node.args[1:], node.kwargs.get("inplace")) if value is True]
    return node.target in _IN_PLACE or bool(flags) or str(getattr(node.target, "__name__", "")).endswith("_")


def _source_of_view(operation: Operation | None) -> Node | None:
    if isinstance(operation, FlattenOp | PermuteOp) or (isinstance(operation, UnitwiseOp) and operation.alias):
        return operation.source
    return None


# --- kinds of operations on units (features or channels) -------------------------------------------------------------

Constants = Tensor
"""The value of each unit that is the same for every input, and NaN for the others; double precision."""


@dataclass(frozen=True)
class LayerOp:
    """A linear layer or a convolution: mixes the units of ``source`` by its weights to new ones."""

    source: Node
    path: str


@dataclass(frozen=True)
class UnitwiseOp:
    """Treats each unit by itself: activations, pooling, batch normalisation, depthwise convolutions."""

    source: Node
    constant: Callable[[Constants], Constants]  # from constant units of the input to those of the output
    path: str | None = None  # the module whose parameters belong to the units one by one, if any
    dim: int | None = None  # along which the units must lie, or None for any
    ndim: int | None = None  # of the input, or None for any
    alias: bool = False  # whether the result shares memory with the source


@dataclass(frozen=True)
class BinaryOp:
    """Two tensors of the same units combined unit by unit: a sum, a product."""

    sources: tuple[Node, Node]
    combine: Callable[[Constants, Constants], Constants]
    adds: bool = False


@dataclass(frozen=True)
class ConcatOp:
    """Units of several tensors side by side, along ``dim``."""

    sources: tuple[Node, ...]
    dim: int


@dataclass(frozen=True)
class FlattenOp:
    """Dimensions ``start`` to ``end`` become one: flatten, and views and squeezes that amount to it.

    ``sizes`` are those passed to a view: -1 where it infers them, 0 where the network computes them.
    """

    source: Node
    start: int
    end: int
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PermuteOp:
    """Dimensions in another order; those not in ``order`` are reduced to their mean or maximum."""

    source: Node
    order: tuple[int, ...]


@dataclass(frozen=True)
class ShapeQuery:
    """Reads a shape, which changes when units along the dimension it asks for are removed."""

    source: Node


@dataclass(frozen=True)
class OpaqueOp:
    """Anything else: the units of its inputs stay. ``why`` is a note for the user, or empty."""

    sources: tuple[Node, ...]
    why: str = ""


Operation = LayerOp | UnitwiseOp | BinaryOp | ConcatOp | FlattenOp | PermuteOp | ShapeQuery | OpaqueOp


def same(values: Constants) -> Constants:
    """Constants stay what they are."""
    return values


def zeros_only(values: Constants) -> Constants:
    """Only zeros stay constant: at borders padded with zeros other values do not."""
    return values.where(values == 0, torch.nan)


def unknown(values: Constants) -> Constants:
    """Nothing stays constant."""
    return torch.full_like(values, torch.nan)


def applied(function: Callable[[Tensor], Tensor]) -> Callable[[Constants], Constants]:
    """Apply ``function`` to constants; NaN and infinite results count as unknown."""

    def constant(values: Constants) -> Constants:
        with torch.no_grad():
            found = function(values.clone())
        return found.where(values.isfinite() & found.isfinite(), torch.nan)

    return constant


def combined(function: Callable[[Tensor, Tensor], Tensor], *, product: bool) -> Callable[..., Constants]:
    """Combine two constants to one; a product with zero is zero even where the other factor is unknown."""

    def constant(left: Constants, right: Constants) -> Constants:
        with torch.no_grad():
            found = function(left.clone(), right.clone())
        found = found.where(left.isfinite() & right.isfinite() & found.isfinite(), torch.nan)
        return torch.where((left == 0) | (right == 0), 0.0, found) if product else found

    return constant


# --- layers that rewriting may add -----------------------------------------------------------------------------------


class ColumnSelection(nn.Module):
    """Selects the entries ``index`` of the last dimension: those that the linear layer behind it reads."""

    index: Tensor

    def __init__(self, index: Tensor):
        super().__init__()
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        """The chosen entries of the last dimension."""
        return x.index_select(-1, self.index)

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{len(self.index)}"


class ChannelShift(nn.Module):
    """Adds a constant to each channel (along ``dim``), in place of a branch that is the same for every input."""

    shift: Tensor

    def __init__(self, shift: Tensor, dim: int):
        super().__init__()
        self.register_buffer("shift", shift)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """The input, each channel shifted."""
        return x + self.shift.view(-1, *[1] * (x.dim() - self.dim - 1))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{len(self.shift)}, dim={self.dim}"
