"""A network's structure as JSON, for networks made of plain ``torch.nn`` layers.

So that a saved posterior can be loaded without its network's source: a tree of layers from ``torch.nn`` with the
arguments they were made with. Only names on a fixed list are ever instantiated, with plain numbers, strings and
booleans; anything else is not described, and loading then asks for the network.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from knowable.errors import DamagedArtifact

_CONTAINERS = ("Sequential", "ModuleList")
_LAYERS = frozenset(
    [
        "Linear",
        "Bilinear",
        "Identity",
        "Flatten",
        "Unflatten",
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "ConvTranspose1d",
        "ConvTranspose2d",
        "ConvTranspose3d",
        "MaxPool1d",
        "MaxPool2d",
        "MaxPool3d",
        "AvgPool1d",
        "AvgPool2d",
        "AvgPool3d",
        "AdaptiveAvgPool1d",
        "AdaptiveAvgPool2d",
        "AdaptiveAvgPool3d",
        "AdaptiveMaxPool1d",
        "AdaptiveMaxPool2d",
        "AdaptiveMaxPool3d",
        "BatchNorm1d",
        "BatchNorm2d",
        "BatchNorm3d",
        "LayerNorm",
        "GroupNorm",
        "InstanceNorm1d",
        "InstanceNorm2d",
        "RMSNorm",
        "Dropout",
        "Dropout1d",
        "Dropout2d",
        "Dropout3d",
        "AlphaDropout",
        "Embedding",
        "ReLU",
        "ReLU6",
        "LeakyReLU",
        "PReLU",
        "ELU",
        "SELU",
        "CELU",
        "GELU",
        "SiLU",
        "Mish",
        "Tanh",
        "Sigmoid",
        "Softplus",
        "Softsign",
        "Hardtanh",
        "Hardswish",
        "Hardsigmoid",
        "Softmax",
        "LogSoftmax",
        "LogSigmoid",
        "Tanhshrink",
        "Upsample",
        "ZeroPad2d",
        "PixelShuffle",
    ]
)
_PLACEMENT = ("device", "dtype", "inplace", "_weight", "_freeze")
_MOST_MODULES = 100_000


def describe(net: nn.Module) -> dict[str, Any] | None:
    """The structure of ``net``, or None if it has a part that cannot be described."""
    name = type(net).__name__
    if type(net) is not getattr(nn, name, None) or net._forward_hooks or net._forward_pre_hooks:
        return None
    if name in _CONTAINERS:
        children = {key: describe(child) for key, child in net.named_children()}
        return None if None in children.values() else {"layer": name, "children": children}
    if name not in _LAYERS:
        return None
    arguments = {key: _argument(net, key) for key in _parameters_of(type(net))}
    return {"layer": name, "arguments": arguments} if all(_plain(value) for value in arguments.values()) else None


def build(description: dict[str, Any]) -> nn.Module:
    """The network of a description, with weights not yet filled in."""
    count = [0]
    try:
        return _build(description, count)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedArtifact(f"The saved network structure cannot be built: {error}. Pass net= instead.") from None


def same_tensors(net: nn.Module, other: nn.Module) -> bool:
    """Whether two networks have parameters and buffers of the same names and shapes."""
    return _shapes(net) == _shapes(other)


def _shapes(net: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in [*net.named_parameters(), *net.named_buffers()]}


def _build(description: dict[str, Any], count: list[int]) -> nn.Module:
    count[0] += 1
    if count[0] > _MOST_MODULES:
        raise ValueError("too many layers")
    name = description["layer"]
    if name in _CONTAINERS:
        container: Any = getattr(nn, name)()
        for key, child in description["children"].items():
            container.add_module(key, _build(child, count))
        return container
    if name not in _LAYERS:
        raise ValueError(f"{name!r} is not a known layer")
    return getattr(nn, name)(**{key: _untuple(value) for key, value in description["arguments"].items()})


def _parameters_of(layer: type[nn.Module]) -> list[str]:
    names = list(inspect.signature(layer.__init__).parameters)[1:]
    return [name for name in names if name not in _PLACEMENT and name not in ("args", "kwargs")]


def _argument(net: nn.Module, name: str) -> Any:
    if name == "num_parameters" and isinstance(net, nn.PReLU):
        return net.num_parameters
    value = getattr(net, name)
    if name == "bias":
        return value is not None
    return list(value) if isinstance(value, tuple) else value


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


def _untuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
