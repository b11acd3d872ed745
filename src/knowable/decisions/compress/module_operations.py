"""Which kind of operation each layer of ``torch.nn`` is."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from knowable.core.network.gates import Gates
from knowable.decisions.compress.graph import (
    Constants,
    Layer,
    Opaque,
    Operation,
    Pass,
    Shift,
    applied,
    same,
    shape_of,
    unknown,
    zeros_only,
)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Threshold),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
)
_POOLS = {
    **{getattr(nn, f"{kind}Pool{n}d"): n + 2 for kind in ("Max", "AdaptiveAvg", "AdaptiveMax") for n in (1, 2, 3)},
    **{getattr(nn, f"{kind}Pad{n}d"): n + 2 for kind in ("Reflection", "Replication") for n in (1, 2, 3)},
}
_AVERAGE_POOLS = {getattr(nn, f"AvgPool{n}d"): n + 2 for n in (1, 2, 3)}
_PADS = {getattr(nn, f"{kind}Pad{n}d"): n + 2 for kind in ("Zero", "Constant") for n in (1, 2, 3)}
_UPSAMPLING = (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
EVEN_MODES = ("nearest", "nearest-exact", "linear", "bilinear", "trilinear")  # weights sum to 1: constants stay


class Uses:
    """How often each module is called, and which parameters several modules share."""

    def __init__(self, module: fx.GraphModule):
        self._module = module
        self._calls = Counter(id(self.of(node)) for node in module.graph.nodes if node.op == "call_module")
        owners = {id(each): each for each in module.modules()}.values()
        self._shares = Counter(id(value) for owner in owners for value in owner.parameters(recurse=False))

    def of(self, node: Node) -> nn.Module:
        """The module a node calls."""
        return self._module.get_submodule(str(node.target))

    def once(self, module: nn.Module) -> bool:
        """Whether the module is called once, with parameters of its own, and nothing listens in by a hook."""
        shared = any(self._shares[id(value)] > 1 for value in module.parameters())
        return self._calls[id(module)] == 1 and not shared and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Whether the module's output is not its forward's alone."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def module_operation(node: Node, uses: Uses) -> Operation:
    """The operation of a node that calls a module; anything but the plain classes of ``torch.nn`` is opaque."""
    module, sources = uses.of(node), tuple(node.all_input_nodes)
    found = None if len(sources) != 1 or hooked(module) else _plain_operation(node, sources[0], module, uses)
    if found is not None:
        return found
    why = f"{node.target} ({type(module).__name__}) was left as it is" if _matters(module, sources) else ""
    return Opaque(sources, why)


def _matters(module: nn.Module, sources: tuple[Node, ...]) -> bool:
    return any(True for _ in module.parameters()) or any(source.op != "placeholder" for source in sources)


def _plain_operation(node: Node, source: Node, module: Any, uses: Uses) -> Operation | None:
    kind, path = type(module), str(node.target)
    if kind in _SAME:
        return Pass(source, same, alias=True)
    if kind in _ACTIVATIONS or (kind is nn.PReLU and module.num_parameters == 1):
        return Pass(source, applied(_in_double(module)))
    pool = _pool(module, source)
    if pool is not None:
        return pool
    if not uses.once(module):
        return None
    if kind is nn.Linear or (kind in (*CONVOLUTIONS, *TRANSPOSED) and module.groups == 1):
        return Layer(source, path)
    return _channelwise(source, module, path)


def _pool(module: Any, source: Node) -> Pass | None:
    kind = type(module)
    if kind in _POOLS and not getattr(module, "return_indices", False):
        return Pass(source, same, dim=1, ndim=_POOLS[kind])
    if kind in _AVERAGE_POOLS:
        uneven = _any(module.padding) or getattr(module, "divisor_override", None) is not None
        return Pass(source, zeros_only if uneven else same, dim=1, ndim=_AVERAGE_POOLS[kind])
    if kind in _PADS:
        return Pass(source, zeros_only if module.value == 0 else unknown, dim=1, ndim=_PADS[kind])
    if kind in _UPSAMPLING:
        return Pass(source, same if module.mode in EVEN_MODES else zeros_only, dim=1, ndim=_ndim(source))
    return None


def _channelwise(source: Node, module: Any, path: str) -> Pass | None:
    kind = type(module)
    if kind in BATCH_NORMS and module.running_mean is not None:
        return Pass(source, lambda values: _normalised(module, values), path, dim=1)
    if kind is Shift:
        return Pass(source, lambda values: values + module.shift.double(), path, dim=module.dim)
    if kind is nn.PReLU:
        return Pass(source, applied(lambda values: _leaked(module, values)), path, dim=1)
    if kind is Gates and module.units > 1:
        return Pass(source, lambda values: _gated(module, values), path, dim=module.dim % (_ndim(source) or 1))
    if kind in CONVOLUTIONS and module.groups == module.in_channels == module.out_channels:
        return Pass(source, lambda values: _depthwise(module, values), path, dim=1, ndim=len(module.kernel_size) + 2)
    return None


def _normalised(module: Any, values: Constants) -> Constants:
    scale = 1 / (module.running_var.double() + module.eps).sqrt()
    shift = -module.running_mean.double() * scale
    if module.affine:
        weight, bias = module.weight.detach().double(), module.bias.detach().double()
        return torch.where(weight == 0, bias, (values * scale + shift) * weight + bias)
    return values * scale + shift


def _leaked(module: Any, values: Constants) -> Constants:
    return torch.where(values > 0, values, values * module.weight.detach().double())


def _gated(module: Any, values: Constants) -> Constants:
    gate = module.gate.detach().double()
    return torch.where(gate == 0, 0.0, values * gate)


def _depthwise(module: Any, values: Constants) -> Constants:
    weight = module.weight.detach().double().flatten(1)  # (channels, kernel)
    bias = 0.0 if module.bias is None else module.bias.detach().double()
    known = values if not pads_with_zeros(module) else zeros_only(values)
    return torch.where(weight.any(1), known * weight.sum(1), 0.0) + bias


def pads_with_zeros(module: nn.Module) -> bool:
    """Whether a convolution sees zeros beyond the border, where a constant channel is then not constant."""
    if isinstance(module, _ConvTransposeNd):
        return True
    assert isinstance(module, _ConvNd)
    return module.padding_mode == "zeros" and any(module._reversed_padding_repeated_twice)


def _in_double(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).double().eval()


def _any(padding: object) -> bool:
    return any(padding) if isinstance(padding, tuple | list) else bool(padding)


def _ndim(node: Node) -> int | None:
    shape = shape_of(node)
    return None if shape is None else len(shape)
