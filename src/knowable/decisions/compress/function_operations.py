"""Which kind of operation each function and tensor method is."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from knowable.decisions.compress.graph import (
    Ask,
    Concatenate,
    Join,
    Merge,
    Move,
    Opaque,
    Operation,
    Pass,
    applied,
    combined,
    same,
    shape_of,
    unknown,
    zeros_only,
)
from knowable.decisions.compress.module_operations import EVEN_MODES

_SAME = {"contiguous", "clone", "detach"}
_UNARY = {
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "tanh", "sigmoid", "softplus"),
    *("softsign", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "exp", "neg", "abs", "square", "sin", "cos"),
    *("clamp", "relu_", "tanh_", "sigmoid_", "clamp_", "negative"),
}
_BINARY = {
    **dict.fromkeys(("add", "iadd", "add_"), "add"),
    **dict.fromkeys(("sub", "isub", "sub_"), "sub"),
    **dict.fromkeys(("mul", "imul", "mul_", "multiply"), "mul"),
    **dict.fromkeys(("div", "truediv", "itruediv", "div_"), "div"),
    **dict.fromkeys(("maximum", "minimum"), "largest"),
}
_POOLS = {f"{kind}_pool{n}d": n + 2 for kind in ("max", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)}
_AVERAGE_POOLS = {f"avg_pool{n}d": n + 2 for n in (1, 2, 3)}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_QUESTIONS = {"size", "dim", "numel", "ndimension"}
_MODULES = (torch, F, operator, torch.Tensor)


def function_operation(node: Node) -> Operation:
    """The operation of a node that calls a function or a method of tensors."""
    name, sources = _name(node), tuple(node.all_input_nodes)
    tensors = [source for source in sources if shape_of(source) is not None]
    if name is None or not tensors:
        return Opaque(sources, "" if not tensors else f"{node.name} was left as it is")
    if name in _QUESTIONS or (name == "getattr" and shape_of(node) is None):
        return Ask(tensors[0])
    found = _rearrangement(node, name) if shape_of(node) is not None else None
    found = found or _unit_by_unit(node, name, tensors)
    return found or Opaque(sources, f"{node.name} was left as it is")


def _name(node: Node) -> str | None:
    """The name of a method, or of a function that is one of torch's or Python's own."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "").removeprefix("_")
    known = [getattr(module, name, None) for module in _MODULES] + [getattr]
    pooling = name in _POOLS and str(getattr(node.target, "__module__", "")).startswith("torch")
    return name if pooling or node.target in known else None


def _unit_by_unit(node: Node, name: str, tensors: list[Node]) -> Operation | None:
    source = tensors[0]
    if node.args[:1] != (source,) and name not in _BINARY:
        return None
    if name in _SAME:
        return Pass(source, same, alias=True)
    if name in _DROPOUTS:
        return None if _argument(node, "training", 2, True) else Pass(source, same, alias=True)
    if name in _POOLS and not _argument(node, "return_indices", 6, False):
        return Pass(source, same, dim=1, ndim=_POOLS[name])
    if name in _AVERAGE_POOLS:
        uneven = _argument(node, "padding", 3, 0) not in (0, (0,), (0, 0), (0, 0, 0), [0], [0, 0], [0, 0, 0])
        uneven = uneven or _argument(node, "divisor_override", 6, None) is not None
        return Pass(source, zeros_only if uneven else same, dim=1, ndim=_AVERAGE_POOLS[name])
    if name == "interpolate":
        even = _argument(node, "mode", 3, "nearest") in EVEN_MODES
        return Pass(source, same if even else zeros_only, dim=1, ndim=len(shape_of(source) or ()))
    if name in _UNARY and len(node.all_input_nodes) == 1:
        return Pass(source, applied(lambda values: _call(node, {source: values})))
    return _binary(node, _BINARY[name], tensors) if name in _BINARY else None


def _binary(node: Node, kind: str, tensors: list[Node]) -> Operation | None:
    if len(node.args) != 2:
        return None
    left, right = node.args
    if len(tensors) == 1 and left is not right:
        source = tensors[0]
        others = [each for each in node.args if each is not source]
        if all(isinstance(each, int | float) for each in others):
            return Pass(source, applied(lambda values: _call(node, {source: values})))
        return Pass(source, unknown)
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    if left is right:
        return Pass(left, applied(lambda values: _call(node, {left: values})))
    both = combined(lambda a, b: _call(node, {left: a, right: b}), product=kind == "mul")
    return Join((left, right), both, adds=kind == "add" and not node.kwargs)


def _rearrangement(node: Node, name: str) -> Operation | None:
    source = node.args[0] if node.args else None
    if name in ("cat", "concat", "concatenate"):
        return _concatenation(node)
    if not isinstance(source, Node) or shape_of(source) is None:
        return None
    if name in ("flatten", "view", "reshape", "squeeze"):
        return merge(node, source, _sizes(node, name))
    if name in ("permute", "transpose", "swapaxes"):
        return _moved(node, source, name)
    return _reduced(node, source) if name in ("mean", "amax") else None


def _concatenation(node: Node) -> Operation | None:
    tensors = node.args[0] if node.args else node.kwargs.get("tensors")
    dim = _argument(node, "dim", 1, 0)
    if not isinstance(tensors, tuple | list) or not isinstance(dim, int):
        return None
    nodes = tuple(each for each in tensors if isinstance(each, Node))
    return Concatenate(nodes, dim % len(shape_of(node) or (0,))) if len(nodes) == len(tensors) else None


def merge(node: Node, source: Node, sizes: tuple[int, ...] | None) -> Merge | None:
    """Which neighbouring dimensions became one, judged by the shapes before and after; the batch must not be one."""
    before, after = shape_of(source), shape_of(node)
    if before is None or after is None or len(after) > len(before):
        return None
    extra = len(before) - len(after)
    for start in range(1, len(after)):
        end = start + extra
        if after == (*before[:start], prod(before[start : end + 1]), *before[end + 1 :]):
            return Merge(source, start, end, sizes)
    return None


def _sizes(node: Node, name: str) -> tuple[int, ...] | None:
    """Sizes that are written down; a squeeze of whatever is 1 would also squeeze a last single unit."""
    if name == "flatten" or (name == "squeeze" and (len(node.args) > 1 or node.kwargs)):
        return None
    if name == "squeeze":
        return tuple(shape_of(node) or ())
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return tuple(each if isinstance(each, int) else 0 for each in sizes)


def _moved(node: Node, source: Node, name: str) -> Move | None:
    ndim = len(shape_of(source) or ())
    dims: list[Any] = [*node.args[1:], *node.kwargs.values()]
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = list(dims[0])
    if not all(isinstance(each, int) for each in dims):
        return None
    places = [each % ndim for each in dims]
    if name == "permute":
        return Move(source, tuple(places))
    order = list(range(ndim))
    order[places[0]], order[places[1]] = places[1], places[0]
    return Move(source, tuple(order))


def _reduced(node: Node, source: Node) -> Move | None:
    ndim, after = len(shape_of(source) or ()), len(shape_of(node) or ())
    dims = _argument(node, "dim", 1, None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(each, int) for each in dims):
        return None
    gone = {each % ndim for each in dims}
    kept = tuple(-1 if each in gone else each for each in range(ndim))  # -1: still there, with size 1
    return Move(source, kept if after == ndim else tuple(each for each in kept if each >= 0))


def _argument(node: Node, name: str, place: int, default: Any) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else default)


def _call(node: Node, values: dict[Node, Any]) -> Any:
    """The node's function at other operands."""
    args = [values.get(each, each) if isinstance(each, Node) else each for each in node.args]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **node.kwargs)
    function: Any = node.target
    return function(*args, **node.kwargs)
