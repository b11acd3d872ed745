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
    """The graph of ``net`` over its own modules (not copies), or None if its forward cannot be followed.

    Layers of ``torch.nn`` are nodes of the graph. A part of the network whose forward cannot be followed (it branches
    on values, say) is one node too; only where that part is the whole network there is no graph.
    """
    tracer = _LayerTracer()
    try:
        graph = tracer.trace(net)
    except Exception:  # what a user's forward raises when it is given a proxy may be anything
        return None
    module = fx.GraphModule(net, graph, class_name=type(net).__name__)
    graph.eliminate_dead_code()  # leftovers of parts that could not be followed
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
        return isinstance(m, Gates | Columns | Shift) or super().is_leaf_module(m, module_qualified_name)

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


# --- What a graph asks about shapes, and what it changes in place: where removing units could have side effects ------

_ABOUT_ALL = ("numel",)
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)


def asks_about_units(question: Node, dim: int, operations: Mapping[Node, Operation]) -> bool:
    """Whether the number of units, along ``dim`` of what is asked, has an effect other than the size of a flattening.

    Args:
        question: A node such as ``x.size(1)`` or ``x.shape``.
        dim: The dimension along which the units lie.
        operations: What each node does.
    """
    source = question.all_input_nodes[0]
    ndim = len(shape_of(source) or ())
    if question.op == "call_method":
        if question.target in ("dim", "ndimension"):
            return False
        if question.target in _ABOUT_ALL:
            return _has_effect(question, operations)
        place = question.args[1] if len(question.args) > 1 else question.kwargs.get("dim")
        if isinstance(place, int):
            return place % ndim == dim and _has_effect(question, operations)
    elif question.args[1:2] != ("shape",):
        return question.args[1:2] not in (("ndim",), ("dtype",), ("device",))
    return any(_part_has_effect(user, ndim, dim, operations) for user in question.users)


def _part_has_effect(user: Node, ndim: int, dim: int, operations: Mapping[Node, Operation]) -> bool:
    """Whether what ``user`` takes out of a whole shape matters."""
    if user.target is not operator.getitem:
        return not isinstance(operations.get(user), Merge)
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
        elif not isinstance(operations.get(user), Merge):
            return True
    return False


def changed_in_place(module: fx.GraphModule, operations: Mapping[Node, Operation]) -> set[Node]:
    """Nodes whose values are overwritten while others still read them, and nodes that share memory with such."""
    tainted: set[Node] = set()
    for node in module.graph.nodes:
        if not is_in_place(node, module) or not node.all_input_nodes:
            continue
        here, below = node.all_input_nodes[0], node
        while True:
            if any(user is not below for user in here.users):
                tainted.add(here)
            above = _source_of_view(operations.get(here))
            if above is None:
                break
            here, below = above, here
    return tainted


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
    if isinstance(operation, Merge | Move) or (isinstance(operation, Pass) and operation.alias):
        return operation.source
    return None


# --- What the nodes of a network's graph do to units (features or channels), in the few kinds that matter here -------
#
# A :class:`Layer` mixes units by its weights. A :class:`Pass` treats each unit by itself. :class:`Join`,
# :class:`Concatenate`, :class:`Merge` and :class:`Move` rearrange them. :class:`Opaque` is everything else: units that
# go
# into it stay.

Constants = Tensor
"""The value of each unit where it is the same for every input, NaN where it is not; double precision."""


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution: reads units of ``source`` by weights, makes new ones."""

    source: Node
    path: str


@dataclass(frozen=True)
class Pass:
    """Unit by unit: activations, pooling, batch normalisation, depthwise convolutions.

    Attributes:
        source: What it acts on.
        constant: What becomes of units that are constant.
        path: The module whose parameters belong to the units one by one, if any.
        dim: The dimension the units must lie along, or None for any.
        ndim: How many dimensions the input must have, or None for any.
        alias: Whether the result shares memory with the source.
    """

    source: Node
    constant: Callable[[Constants], Constants]
    path: str | None = None
    dim: int | None = None
    ndim: int | None = None
    alias: bool = False


@dataclass(frozen=True)
class Join:
    """Two tensors of the same units combined unit by unit: a sum, a product."""

    sources: tuple[Node, Node]
    combine: Callable[[Constants, Constants], Constants]
    adds: bool = False


@dataclass(frozen=True)
class Concatenate:
    """Units of several tensors side by side, along ``dim``."""

    sources: tuple[Node, ...]
    dim: int


@dataclass(frozen=True)
class Merge:
    """Dimensions ``start`` to ``end`` become one: flatten, and views and squeezes that amount to it.

    Attributes:
        source: What it acts on.
        start: The first of the merged dimensions.
        end: The last.
        sizes: The sizes a view was asked for, -1 where it is to find out itself; None if no size is written down.
    """

    source: Node
    start: int
    end: int
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Move:
    """Dimensions in another order; those not in ``order`` are averaged over or reduced to their largest value."""

    source: Node
    order: tuple[int, ...]


@dataclass(frozen=True)
class Ask:
    """A question about a shape. Its answer changes when units go, if it is about their dimension."""

    source: Node


@dataclass(frozen=True)
class Opaque:
    """Anything else: what goes in stays as it is.

    Attributes:
        sources: What it acts on.
        why: For the notes; empty if there is nothing to say.
    """

    sources: tuple[Node, ...]
    why: str = ""


Operation = Layer | Pass | Join | Concatenate | Merge | Move | Ask | Opaque


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
    """Constants go through ``function``; what is not finite counts as unknown."""

    def constant(values: Constants) -> Constants:
        with torch.no_grad():
            found = function(values.clone())
        return found.where(values.isfinite() & found.isfinite(), torch.nan)

    return constant


def combined(function: Callable[[Tensor, Tensor], Tensor], *, product: bool) -> Callable[..., Constants]:
    """Two constants give a constant; nothing times zero is zero, whatever the other factor is."""

    def constant(left: Constants, right: Constants) -> Constants:
        with torch.no_grad():
            found = function(left.clone(), right.clone())
        found = found.where(left.isfinite() & right.isfinite() & found.isfinite(), torch.nan)
        return torch.where((left == 0) | (right == 0), 0.0, found) if product else found

    return constant


# --- The two layers a rewritten network may have beyond those of the original ----------------------------------------


class Columns(nn.Module):
    """Takes some of the last dimension's entries: those that the layer behind it reads.

    Args:
        index: Which, in order, ``(count,)``.
    """

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


class Shift(nn.Module):
    """Adds a constant to each channel: what is left of a branch that is the same for every input.

    Args:
        shift: The constants, ``(channels,)``.
        dim: The dimension of the channels.
    """

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
