"""Moments through an unmodified network: a tensor subclass that replaces each operation by its rule.

An :class:`Uncertain` tensor looks like its mean to the modules that handle it. Weights come in as such tensors, and
whatever they meet becomes one. An operation without a rule is refused by name, as are weights that are used twice and
sums of two random results: their correlation would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.layer_operations import CONVOLUTIONS, LINEAR, METADATA, operands
from knowable.core.model import Model
from knowable.core.types import Buffers, Params
from knowable.inference.variational import moments
from knowable.inference.variational.moment_layers import SHIFTS, STRETCHES, NoRule, apply_rule
from knowable.inference.variational.moments import Moments


@dataclass
class Pass:
    """One pass through the network.

    Attributes:
        limit: The widest linear layer whose outputs' covariances are followed.
        used: Weights that were used.
    """

    limit: int
    used: set[str] = field(default_factory=set)


def propagate(
    model: Model, params: dict[str, Moments], x: Tensor, *, buffers: Buffers, training: bool = False, limit: int
) -> Moments:
    """The moments of the network's outputs at ``x``, for weights with the moments in ``params``."""
    return _moments(model.forward(_weights(params, limit), x, buffers=buffers, training=training))


def check_layers(model: Model, x: Tensor, *, limit: int) -> None:
    """Raise ``Unsupported``, naming the layer, if the network does something for which there is no rule."""
    network = model.network.copy()
    inside: list[tuple[str, nn.Module]] = []
    for path, module in network.modules(training=True).items():
        module.register_forward_pre_hook(partial(_enter, inside, path))
        module.register_forward_hook(partial(_leave, inside))
    random = set(model.random_names)
    params = {
        name: Moments(value, torch.ones_like(value) if name in random else None)
        for name, value in model.network_params(model.params()).items()
    }
    try:
        with torch.no_grad():
            network(_weights(params, limit), x[:2], buffers=model.buffers(), training=True)
    except NoRule as error:
        path, module = inside[-1]
        raise NoRule(error.operation, f"{type(module).__name__} {path!r}" if path else type(module).__name__) from None


def _enter(inside: list[tuple[str, nn.Module]], path: str, module: nn.Module, args: Any) -> None:
    inside.append((path, module))


def _leave(inside: list[tuple[str, nn.Module]], module: nn.Module, args: Any, output: Any) -> None:
    inside.pop()


def _weights(params: dict[str, Moments], limit: int) -> Params:
    through = Pass(limit)
    return {
        name: value.mean if value.variance is None else Uncertain(value, through, name)
        for name, value in params.items()
    }


class Uncertain(torch.Tensor):
    """A tensor of random values.

    Attributes:
        moments: What is known of them.
        through: The pass they are part of.
        path: Name of the weight, or None of a result.
    """

    moments: Moments
    through: Pass
    path: str | None

    @staticmethod
    def __new__(cls, value: Moments, through: Pass, path: str | None = None) -> Uncertain:  # noqa: D102
        self = value.mean.as_subclass(cls)
        self.moments, self.through, self.path = value, through, path
        return self

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace an operation by its rule."""
        kwargs = kwargs or {}
        if func.__name__ in METADATA:
            return _answer(func, args, kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Uncertain)]
        if not given:
            raise NoRule(func.__name__)  # they are in a list: weights, or tensors to be joined
        if func is LINEAR or func in CONVOLUTIONS:
            return Uncertain(_layer(func, *operands(func, args, kwargs)), given[0].through)
        if len(given) > 1 and func.__name__ in (*SHIFTS, *STRETCHES):
            raise NoRule(f"{func.__name__} of two random results")
        if len(given) > 1 or given[0].path is not None:
            raise NoRule(func.__name__)
        opened = {name: _opened(each) for name, each in kwargs.items()}
        return Uncertain(apply_rule(func, tuple(map(_opened, args)), opened), given[0].through)


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a tensor says about itself."""
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
    if isinstance(found, Tensor):  # a transpose, a gradient: that is more than a question
        raise NoRule("an attribute of a random tensor that is a tensor itself, such as its transpose")
    return found


def _layer(
    func: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> Moments:
    """A linear layer or a convolution."""
    if isinstance(x, Uncertain) and x.path is not None:
        raise NoRule(f"a layer whose input is the weight {x.path!r}")
    for each in (weight, bias):
        if isinstance(each, Uncertain):
            if each.path is None:
                raise NoRule("a layer whose weight is itself a random result")
            if each.path in each.through.used:
                raise NoRule(f"a second use of the weight {each.path!r}")
            each.through.used.add(each.path)
    own = None if bias is None else _moments(bias)
    if func is LINEAR:
        through = next(each.through for each in (x, weight, bias) if isinstance(each, Uncertain))
        return moments.linear(_moments(x), _moments(weight), own, limit=through.limit)
    return moments.convolution(func, _moments(x), _moments(weight), own, rest)


def _moments(value: Tensor) -> Moments:
    return value.moments if isinstance(value, Uncertain) else Moments(value)


def _opened(value: Any) -> Any:
    return value.moments if isinstance(value, Uncertain) else value
