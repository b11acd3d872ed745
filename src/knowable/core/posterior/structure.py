"""A network's structure as JSON, so that a posterior can be loaded without its network's source.

Only layers on a list are ever instantiated, with plain numbers, strings and booleans; anything else is not described,
and loading then asks for the network.
"""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from knowable.core.network.feature_maps import RBF, Fourier, Polynomial
from knowable.core.network.own_modules import Erf, Residual
from knowable.errors import DamagedArtifact

_LAYERS = frozenset(
    {
        *("Linear", "Bilinear", "Identity", "Flatten", "Embedding", "Upsample", "ZeroPad2d", "PixelShuffle"),
        *(f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "BatchNorm") for n in (1, 2, 3)),
        *(f"Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)),
        *("LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm1d", "InstanceNorm2d"),
        *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"),
        *("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid"),
        *("Softplus", "Softsign", "Hardtanh", "Hardswish", "Hardsigmoid", "Softmax", "LogSoftmax", "LogSigmoid"),
        *("Erf", "Polynomial", "Fourier", "RBF"),
    }
)
_OWN: dict[str, type[nn.Module]] = {each.__name__: each for each in (Polynomial, Fourier, RBF, Residual, Erf)}
_CONTAINERS = ("Sequential", "Residual")
_LEFT_OUT = ("device", "dtype", "inplace", "_weight", "_freeze", "min_value", "max_value", "args", "kwargs")
_MOST_MODULES = 20_000
_FREE_NUMBERS = 2**25  # of a network, beyond four for every number that was saved with it
_KEY = re.compile(r"\w+")  # of a layer in its container: it is part of attribute names


def describe(net: nn.Module) -> dict[str, Any] | None:
    """The structure of ``net``, or None if it has a part that cannot be described (tied weights are such a part)."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    if len({id(value) for _, value in tensors}) < len(tensors):
        return None
    return _describe(net)


def _describe(net: nn.Module) -> dict[str, Any] | None:
    name = type(net).__name__
    changed = "forward" in vars(net) or net._forward_hooks or net._forward_pre_hooks
    if type(net) is not _class_of(name) or changed:
        return None
    if isinstance(net, nn.Sequential):
        children = {key: None if child is None else _describe(child) for key, child in net._modules.items()}
        known = None not in children.values() and all(map(_KEY.fullmatch, children))
        return {"layer": name, "children": children} if known else None
    if name not in _LAYERS:
        return None
    try:
        names = [*inspect.signature(type(net).__init__).parameters][1:]
        arguments = {key: _argument(net, key) for key in names if key not in _LEFT_OUT}
    except AttributeError:
        return None
    return {"layer": name, "arguments": arguments} if all(_plain(value) for value in arguments.values()) else None


def build(description: dict[str, Any], *, stored: int = 0) -> nn.Module:
    """The network of a description, with weights not yet filled in.

    It is first built without memory, and refused if it has many times the ``stored`` numbers of its artifact.
    """
    try:
        numbers = 4 * stored + _FREE_NUMBERS
        with torch.device("meta"):
            _build(description, _Limit(numbers, _MOST_MODULES))
        return _build(description, _Limit(numbers, _MOST_MODULES))
    except Exception as error:
        raise DamagedArtifact(
            f"The saved network structure cannot be built: {str(error)[:300]}. Pass net= instead."
        ) from None


@dataclass
class _Limit:
    """What is left for a network that is being built."""

    numbers: int
    modules: int

    def take(self, module: nn.Module) -> None:
        self.modules -= 1
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        self.numbers -= sum(value.numel() for value in own)
        if self.modules < 0:
            raise ValueError("too many layers")
        if self.numbers < 0:
            raise ValueError("it is far larger than what was saved with it")


def _build(description: dict[str, Any], limit: _Limit) -> nn.Module:
    name = description["layer"]
    if name in _CONTAINERS:
        container = _class_of(name)()
        for key, child in description["children"].items():
            if not _KEY.fullmatch(key):
                raise ValueError(f"{key[:80]!r} is not the name of a layer")
            container.add_module(key, _build(child, limit))
        limit.take(container)
        return container
    if name not in _LAYERS:
        raise ValueError(f"{name!r} is not a known layer")
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in description["arguments"].items()}
    if not all(_plain(_listed(value)) for value in arguments.values()):
        raise ValueError(f"an argument of {name} is neither a number nor a text")
    if name == "Embedding" and torch.get_default_device().type == "meta":  # else torch would import its compiler
        arguments["_weight"] = torch.empty((arguments["num_embeddings"], arguments["embedding_dim"]))
    with torch.device("cpu") if name in _OWN else nullcontext():  # ours look at the values that they are given
        module = _class_of(name)(**arguments)
    limit.take(module)
    return module


def _class_of(name: str) -> Any:
    """PyTorch's module of this name, or ours."""
    return _OWN.get(name) or getattr(nn, name, None)


def _argument(net: nn.Module, name: str) -> Any:
    value = getattr(net, name)
    if name == "bias":
        return value is not None
    return _listed(value)


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
