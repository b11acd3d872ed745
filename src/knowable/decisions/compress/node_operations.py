"""Which kind of operation each node of a network's graph is: layers of ``torch.nn``, functions and tensor methods."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import (
    BinaryOp,
    ChannelShift,
    ConcatOp,
    Constants,
    FlattenOp,
    LayerOp,
    OpaqueOp,
    Operation,
    PermuteOp,
    ShapeQuery,
    UnitwiseOp,
    applied,
    combined,
    same,
    shape_of,
    unknown,
    zeros_only,
)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SAME_MODULES = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Threshold),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
)
_POOLS_MODULES = {
    **{getattr(nn, f"{kind}Pool{n}d"): n + 2 for kind in ("Max", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)},
    **{getattr(nn, f"{kind}Pad{n}d"): n + 2 for kind in ("Reflection", "Replication") for n in (1, 2, 3)},
}
_AVERAGE_POOLS_MODULES = {getattr(nn, f"AvgPool{n}d"): n + 2 for n in (1, 2, 3)}
_PADS = {getattr(nn, f"{kind}Pad{n}d"): n + 2 for kind in ("Zero", "Constant") for n in (1, 2, 3)}
_UPSAMPLING = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
EVEN_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear")  # weights sum to 1: constants stay
_SAME_FUNCTIONS = {"contiguous", "clone", "detach"}
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
_POOLS_FUNCTIONS = {f"{kind}_pool{n}d": n + 2 for kind in ("max", "adaptive_avg", "adaptive_max") for n in (1, 2, 3)}
_AVERAGE_POOLS_FUNCTIONS = {f"avg_pool{n}d": n + 2 for n in (1, 2, 3)}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
_QUESTIONS = {"size", "dim", "numel", "ndimension"}
_MODULES = (torch, F, operator, torch.Tensor)


def node_operation(node: Node, uses: ModuleUses) -> Operation:
    """The operation of any node."""
    if node.op == "call_module":
        flattens = type(uses.of(node)) is nn.Flatten
        return (merge(node, node.all_input_nodes[0], None) if flattens else None) or module_operation(node, uses)
    if node.op in ("call_function", "call_method") and not (node.target is operator.getitem and shape_of(node) is None):
        return function_operation(node)
    return OpaqueOp(tuple(node.all_input_nodes))  # the input, the output, parameters by name, parts of shapes


# --- modules ---------------------------------------------------------------------------------------------------------


class ModuleUses:
    """How often each module is called, and which parameters are shared between modules."""

    def __init__(self, module: fx.GraphModule):
        self._module = module
        self._calls = Counter(id(self.of(node)) for node in module.graph.nodes if node.op == "call_module")
        owners = {id(each): each for each in module.modules()}.values()
        self._shares = Counter(id(value) for owner in owners for value in owner.parameters(recurse=False))

    def of(self, node: Node) -> nn.Module:
        """The module a node calls."""
        return self._module.get_submodule(str(node.target))

    def once(self, module: nn.Module) -> bool:
        """Whether the module is called once, shares no parameters, and has no hooks."""
        shared = any(self._shares[id(value)] > 1 for value in module.parameters())
        return self._calls[id(module)] == 1 and not shared and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether hooks or a replaced forward may change the module's output."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def module_operation(node: Node, uses: ModuleUses) -> Operation:
    """The operation of a node that calls a module; anything but the plain classes of ``torch.nn`` is opaque."""
    module, sources = uses.of(node), tuple(node.all_input_nodes)
    found = None if len(sources) != 1 or hooked(module) else _plain_operation(node, sources[0], module, uses)
    if found is not None:
        return found
    matters = any(True for _ in module.parameters()) or any(source.op != "placeholder" for source in sources)
    return OpaqueOp(sources, f"{node.target} ({type(module).__name__}) was left as it is" if matters else "")


def _plain_operation(node: Node, source: Node, module: Any, uses: ModuleUses) -> Operation | None:
    kind, path = type(module), str(node.target)
    if kind in _SAME_MODULES:
        return UnitwiseOp(source, same, alias=True)
    if kind in _ACTIVATIONS or (kind is nn.PReLU and module.num_parameters == 1):
        return UnitwiseOp(source, applied(copy.deepcopy(module).double().eval()))
    pool = _pool(module, source)
    if pool is not None:
        return pool
    if not uses.once(module):
        return None
    if kind is nn.Linear or (kind in (*CONVOLUTIONS, *TRANSPOSED) and module.groups == 1):
        return LayerOp(source, path)
    return _channelwise(source, module, path)


def _pool(module: Any, source: Node) -> UnitwiseOp | None:
    kind = type(module)
    if kind in _POOLS_MODULES and not getattr(module, "return_indices", False):
        return UnitwiseOp(source, same, dim=1, ndim=_POOLS_MODULES[kind])
    if kind in _AVERAGE_POOLS_MODULES:
        uneven = _pads(module.padding) or getattr(module, "divisor_override", None) is not None
        return UnitwiseOp(source, zeros_only if uneven else same, dim=1, ndim=_AVERAGE_POOLS_MODULES[kind])
    if kind in _PADS:
        return UnitwiseOp(source, zeros_only if module.value == 0 else unknown, dim=1, ndim=_PADS[kind])
    if kind in _UPSAMPLING:
        return UnitwiseOp(source, same if module.mode in EVEN_MODES else zeros_only, dim=1, ndim=_ndim(source))
    return None


def _channelwise(source: Node, module: Any, path: str) -> UnitwiseOp | None:
    kind = type(module)
    if kind in BATCH_NORMS and module.running_mean is not None:
        return UnitwiseOp(source, lambda values: _normalised(module, values), path, dim=1)
    if kind is ChannelShift:
        return UnitwiseOp(source, lambda values: values + module.shift.double(), path, dim=module.dim)
    if kind is nn.PReLU:
        slopes = module.weight.detach().double()
        return UnitwiseOp(source, applied(lambda values: values.where(values > 0, values * slopes)), path, dim=1)
    if kind is Gates and module.units > 1:
        gate, dim = module.gate.detach().double(), module.dim % (_ndim(source) or 1)
        return UnitwiseOp(source, lambda values: torch.where(gate == 0, 0.0, values * gate), path, dim=dim)
    if kind in CONVOLUTIONS and module.groups == module.in_channels == module.out_channels:
        ndim = len(module.kernel_size) + 2
        return UnitwiseOp(source, lambda values: _depthwise(module, values), path, dim=1, ndim=ndim)
    return None


def _normalised(module: Any, values: Constants) -> Constants:
    scale = 1 / (module.running_var.double() + module.eps).sqrt()
    shift = -module.running_mean.double() * scale
    if module.affine:
        weight, bias = module.weight.detach().double(), module.bias.detach().double()
        return torch.where(weight == 0, bias, (values * scale + shift) * weight + bias)
    return values * scale + shift


def _depthwise(module: Any, values: Constants) -> Constants:
    weight = module.weight.detach().double().flatten(1)  # (channels, kernel)
    bias = 0.0 if module.bias is None else module.bias.detach().double()
    known = values if not pads_with_zeros(module) else zeros_only(values)
    return torch.where(weight.any(1), known * weight.sum(1), 0.0) + bias


def pads_with_zeros(module: nn.Module) -> bool:
    """Whether a convolution pads with zeros, so that a constant channel is not constant at the border."""
    if isinstance(module, _ConvTransposeNd):
        return True
    assert isinstance(module, _ConvNd)
    return module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice)


def _ndim(node: Node) -> int | None:
    shape = shape_of(node)
    return None if shape is None else len(shape)


def _pads(padding: Any) -> bool:
    return any(padding) if isinstance(padding, tuple | list) else bool(padding)


# --- functions and tensor methods ------------------------------------------------------------------------------------


def function_operation(node: Node) -> Operation:
    """The operation of a node that calls a function or a method of tensors."""
    name, sources = _name(node), tuple(node.all_input_nodes)
    tensors = [source for source in sources if shape_of(source) is not None]
    if name is None or not tensors:
        return OpaqueOp(sources, "" if not tensors else f"{node.name} was left as it is")
    if name in _QUESTIONS or (name == "getattr" and shape_of(node) is None):
        return ShapeQuery(tensors[0])
    found = _rearrangement(node, name) if shape_of(node) is not None else None
    found = found or _unit_by_unit(node, name, tensors)
    return found or OpaqueOp(sources, f"{node.name} was left as it is")


def _name(node: Node) -> str | None:
    """The name of a method, or of a function that is one of torch's or Python's own."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "").removeprefix("_")
    known = [getattr(module, name, None) for module in _MODULES] + [getattr]
    pooling = name in _POOLS_FUNCTIONS and str(getattr(node.target, "__module__", "")).startswith("torch")
    return name if pooling or node.target in known else None


def _unit_by_unit(node: Node, name: str, tensors: list[Node]) -> Operation | None:
    source = tensors[0]
    if node.args[:1] != (source,) and name not in _BINARY:
        return None
    if name in _SAME_FUNCTIONS:
        return UnitwiseOp(source, same, alias=True)
    if name in _DROPOUTS:
        return None if _argument(node, "training", 2, True) else UnitwiseOp(source, same, alias=True)
    if name in _POOLS_FUNCTIONS and not _argument(node, "return_indices", 6, False):
        return UnitwiseOp(source, same, dim=1, ndim=_POOLS_FUNCTIONS[name])
    if name in _AVERAGE_POOLS_FUNCTIONS:
        uneven = _pads(_argument(node, "padding", 3, 0)) or _argument(node, "divisor_override", 6, None) is not None
        return UnitwiseOp(source, zeros_only if uneven else same, dim=1, ndim=_AVERAGE_POOLS_FUNCTIONS[name])
    if name == "interpolate":
        even = _argument(node, "mode", 3, "nearest") in EVEN_MODES
        return UnitwiseOp(source, same if even else zeros_only, dim=1, ndim=len(shape_of(source) or ()))
    if name in _UNARY and len(node.all_input_nodes) == 1:
        return UnitwiseOp(source, applied(lambda values: _call(node, {source: values})))
    return _binary(node, _BINARY[name], tensors) if name in _BINARY else None


def _binary(node: Node, kind: str, tensors: list[Node]) -> Operation | None:
    if len(node.args) != 2:
        return None
    left, right = node.args
    if len(tensors) == 1 and left is not right:
        source = tensors[0]
        others = [each for each in node.args if each is not source]
        if all(isinstance(each, int | float) for each in others):
            return UnitwiseOp(source, applied(lambda values: _call(node, {source: values})))
        return UnitwiseOp(source, unknown)
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    if left is right:
        return UnitwiseOp(left, applied(lambda values: _call(node, {left: values})))
    both = combined(lambda a, b: _call(node, {left: a, right: b}), product=kind == "mul")
    return BinaryOp((left, right), both, adds=kind == "add" and not node.kwargs)


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
    return ConcatOp(nodes, dim % len(shape_of(node) or (0,))) if len(nodes) == len(tensors) else None


def merge(node: Node, source: Node, sizes: tuple[int, ...] | None) -> FlattenOp | None:
    """Which neighbouring dimensions became one, by the shapes before and after; the batch dimension must stay."""
    before, after = shape_of(source), shape_of(node)
    if before is None or after is None or len(after) > len(before):
        return None
    extra = len(before) - len(after)
    for start in range(1, len(after)):
        end = start + extra
        if after == (*before[:start], prod(before[start : end + 1]), *before[end + 1 :]):
            return FlattenOp(source, start, end, sizes)
    return None


def _sizes(node: Node, name: str) -> tuple[int, ...] | None:
    """The sizes given to a view; ``squeeze()`` without a dimension would also remove a dimension of one unit."""
    if name == "flatten" or (name == "squeeze" and (len(node.args) > 1 or node.kwargs)):
        return None
    if name == "squeeze":
        return tuple(shape_of(node) or ())
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return tuple(each if isinstance(each, int) else 0 for each in sizes)


def _moved(node: Node, source: Node, name: str) -> PermuteOp | None:
    ndim = len(shape_of(source) or ())
    dims: list[Any] = [*node.args[1:], *node.kwargs.values()]
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = list(dims[0])
    if not all(isinstance(each, int) for each in dims):
        return None
    order = [each % ndim for each in dims]
    if name != "permute":
        first, second = order
        order = list(range(ndim))
        order[first], order[second] = second, first
    return PermuteOp(source, tuple(order))


def _reduced(node: Node, source: Node) -> PermuteOp | None:
    ndim, after = len(shape_of(source) or ()), len(shape_of(node) or ())
    dims = _argument(node, "dim", 1, None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(each, int) for each in dims):
        return None
    gone = {each % ndim for each in dims}
    kept = tuple(-1 if each in gone else each for each in range(ndim))  # -1: still there, with size 1
    return PermuteOp(source, kept if after == ndim else tuple(each for each in kept if each >= 0))


def _argument(node: Node, name: str, place: int, default: Any) -> Any:
    return node.kwargs.get(name, node.args[place] if len(node.args) > place else default)


def _call(node: Node, values: dict[Node, Any]) -> Any:
    """The node's function at other operands."""
    args = [values.get(each, each) if isinstance(each, Node) else each for each in node.args]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **node.kwargs)
    function: Any = node.target
    return function(*args, **node.kwargs)
