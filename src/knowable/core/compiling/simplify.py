"""Simplify a recorded graph that is run operation by operation.

A compiler does all of this and more. Without one, every operation costs its call, and every result its memory:

- what gives back its argument (x / 1, a view of the same shape) is left out;
- what does not depend on the inputs is computed once: differentiating begins with a one that is spread over rows and
  divided by their number, and numbers become tensors before they are multiplied;
- what overwrites nothing that is needed later is done in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_arg

_NEUTRAL = {"sub.Tensor": 0, "add.Tensor": 0, "div.Tensor": 1, "mul.Tensor": 1, "pow.Tensor_Scalar": 1, "mul.Scalar": 1}
_PURE = frozenset(
    {"add", "div", "exp", "mul", "neg", "reciprocal", "sub", "sum", "_to_copy"}
    | {"alias", "detach", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"}
)
_FILLED = {"ones_like": torch.ones, "zeros_like": torch.zeros}
_LARGEST = 1_000_000  # elements of a constant that is kept
_aten = torch.ops.aten
_IN_PLACE = {
    _aten.add.Tensor: _aten.add_.Tensor, _aten.mul.Tensor: _aten.mul_.Tensor, _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.neg.default: _aten.neg_.default, _aten.relu.default: _aten.relu_.default,
    _aten.tanh.default: _aten.tanh_.default, _aten.sigmoid.default: _aten.sigmoid_.default,
    _aten.sub.Tensor: _aten.sub_.Tensor, _aten.div.Tensor: _aten.div_.Tensor,
}  # fmt: skip
_EITHER = (_aten.add.Tensor, _aten.mul.Tensor)  # which of the two is overwritten makes no difference
_FRESH = frozenset(["add", "mul", "sub", "neg", "bmm", "mm", "div", "threshold_backward", "convolution", "addmm"])


def simplify(graph: Any) -> None:
    """Do all three, to a graph that writes nowhere (else a copy may be there to be written to)."""
    if not any(_writes(node) for node in graph.graph.nodes):
        for node in graph.graph.nodes:
            if _does_nothing(node):
                node.replace_all_uses_with(node.args[0])
        graph.graph.eliminate_dead_code()
        fold_constants(graph)
        graph.graph.eliminate_dead_code()
        write_in_place(graph)
    graph.recompile()


def _writes(node: Any) -> bool:
    """Whether a node changes a tensor in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _name(node: Any) -> str:
    """``mul`` for ``aten.mul.Tensor``."""
    return str(node.target).removeprefix("aten.").partition(".")[0]


def _value(node: Any) -> Tensor | None:
    """A tensor like the one that a node computes."""
    found = getattr(node, "meta", {}).get("val")
    return found if isinstance(found, Tensor) else None


def _same_kind(node: Any, other: Any) -> bool:
    """Whether two nodes hold tensors of the same shape and type."""
    first, second = _value(node), _value(other)
    return first is not None and second is not None and first.dtype == second.dtype and first.shape == second.shape


def _does_nothing(node: Any) -> bool:
    """Whether a node gives back its first argument: x - 0, x / 1, a detach, a view of the same shape."""
    if node.op != "call_function" or not node.args or node.kwargs or not _same_kind(node, node.args[0]):
        return False
    name = str(node.target).removeprefix("aten.")
    if name in ("detach.default", "alias.default", "view.default", "_unsafe_view.default", "expand.default"):
        return True
    return len(node.args) == 2 and isinstance(node.args[1], int | float) and _NEUTRAL.get(name) == node.args[1]


# --- constants -------------------------------------------------------------------------------------------------------


def fold_constants(graph: Any) -> None:
    """Compute what does not depend on the graph's inputs now, once, and let the graph look it up."""
    known: dict[Any, Tensor] = {}
    for node in graph.graph.nodes:
        value = _constant(node, known) if node.op == "call_function" else None
        if value is not None:
            known[node] = value
    results = {each for node in graph.graph.nodes if node.op == "output" for each in node.all_input_nodes}
    for number, (node, value) in enumerate(known.items()):
        users = [user for user in node.users if user not in known]
        if node in results or not users:  # results are the caller's, to write into
            continue
        graph.register_buffer(f"_folded_{number}", value, persistent=False)
        with graph.graph.inserting_before(node):
            found = graph.graph.get_attr(f"_folded_{number}")
        found.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, found)


def _constant(node: Any, known: dict[Any, Tensor]) -> Tensor | None:
    """What a node computes, if that is always the same."""
    name, like = _name(node), _value(node)
    if like is None or like.numel() > _LARGEST:
        return None
    if name in _FILLED:
        return _FILLED[name](like.shape, dtype=like.dtype, device=like.device)
    inputs = node.all_input_nodes
    if name not in _PURE or any(each not in known for each in inputs) or (not inputs and name != "_to_copy"):
        return None
    with torch.no_grad():
        return node.target(*map_arg(node.args, lambda each: known[each]), **node.kwargs)


# --- memory ----------------------------------------------------------------------------------------------------------


def write_in_place(graph: Any) -> None:
    """Let an operation overwrite an argument that nothing else needs: half the memory passes through the cache."""
    for node in graph.graph.nodes:
        target = _IN_PLACE.get(node.target) if node.op == "call_function" and not node.kwargs else None
        if target is None:
            continue
        places = (0, 1) if node.target in _EITHER else (0,)
        for place in places:
            if len(node.args) > place and _may_be_overwritten(node.args[place], node):
                rest = [each for number, each in enumerate(node.args) if number != place]
                node.args = (node.args[place], *rest)
                node.target = target
                break


def _may_be_overwritten(argument: Any, by: Any) -> bool:
    """Whether an argument is memory of its own, all of the result's size, that only one operation reads."""
    return (
        isinstance(argument, torch.fx.Node)
        and argument.op == "call_function"
        and _name(argument).removesuffix("_") in _FRESH
        and len(argument.users) == 1
        and by.args.count(argument) == 1
        and _same_kind(argument, by)
    )
