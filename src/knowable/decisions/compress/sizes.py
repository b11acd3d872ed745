"""What a graph asks about shapes, and what it changes in place: where removing units could have side effects."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx import Node

from knowable.decisions.compress.operations import Merge, Move, Operation, Pass
from knowable.decisions.compress.tracing import shape_of

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
