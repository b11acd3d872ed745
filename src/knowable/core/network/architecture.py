"""A network's structure as JSON, for networks made of plain ``torch.nn`` layers.

So that a saved posterior can be loaded without its network's source: a tree of layers from ``torch.nn`` with the
arguments they were made with. Only names on a fixed list are ever instantiated, with plain numbers, strings and
booleans; anything else is not described, and loading then asks for the network.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from knowable.errors import DamagedArtifact

_CONTAINERS = ("Sequential",)
_LAYERS = frozenset(
    {
        *("Linear", "Bilinear", "Identity", "Flatten", "Embedding", "Upsample", "ZeroPad2d", "PixelShuffle"),
        *(f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "BatchNorm") for n in (1, 2, 3)),
        *(f"Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)),
        *("LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm1d", "InstanceNorm2d"),
        *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"),
        *("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid"),
        *("Softplus", "Softsign", "Hardtanh", "Hardswish", "Hardsigmoid", "Softmax", "LogSoftmax", "LogSigmoid"),
    }
)
_LEFT_OUT = ("device", "dtype", "inplace", "_weight", "_freeze", "min_value", "max_value", "args", "kwargs")
_MOST_MODULES = 100_000


def describe(net: nn.Module) -> dict[str, Any] | None:
    """The structure of ``net``, or None if it has a part that cannot be described (tied weights are such a part)."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    if len({id(value) for _, value in tensors}) < len(tensors):
        return None
    return _describe(net)


def _describe(net: nn.Module) -> dict[str, Any] | None:
    name = type(net).__name__
    changed = "forward" in vars(net) or net._forward_hooks or net._forward_pre_hooks
    if type(net) is not getattr(nn, name, None) or changed:
        return None
    if name in _CONTAINERS:
        children = {key: None if child is None else _describe(child) for key, child in net._modules.items()}
        return None if None in children.values() else {"layer": name, "children": children}
    if name not in _LAYERS:
        return None
    try:
        arguments = {key: _argument(net, key) for key in _parameters_of(type(net))}
    except AttributeError:
        return None
    return {"layer": name, "arguments": arguments} if all(_plain(value) for value in arguments.values()) else None


def build(description: dict[str, Any]) -> nn.Module:
    """The network of a description, with weights not yet filled in."""
    count = [0]
    try:
        return _build(description, count)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedArtifact(f"The saved network structure cannot be built: {error}. Pass net= instead.") from None


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
    return [name for name in names if name not in _LEFT_OUT]


def _argument(net: nn.Module, name: str) -> Any:
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
