"""Moments through an unmodified network: a tensor subclass that replaces each operation by its rule.

An :class:`Uncertain` tensor looks like its mean to the modules that handle it. Weights come in as such tensors, and
whatever they meet becomes one. An operation without a rule is refused by name, as are weights that are used twice and
sums of two random results: their correlation would be lost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.inputs import as_rows
from knowable.core.network.layer_operations import CONVOLUTIONS, LINEAR, METADATA, operands
from knowable.core.network.params import Buffers, Params
from knowable.errors import Unsupported
from knowable.inference.variational.moment import algebra as moments
from knowable.inference.variational.moment.activations import parts_of
from knowable.inference.variational.moment.algebra import Moments


@dataclass
class Propagation:
    """One pass through the network."""

    limit: int  # the widest linear layer whose outputs' covariances are followed
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
            network(_weights(params, limit), as_rows(x)[:2], buffers=model.buffers(), training=True)
    except NoRule as error:
        path, module = inside[-1]
        raise NoRule(error.operation, f"{type(module).__name__} {path!r}" if path else type(module).__name__) from None


def _enter(inside: list[tuple[str, nn.Module]], path: str, module: nn.Module, args: Any) -> None:
    inside.append((path, module))


def _leave(inside: list[tuple[str, nn.Module]], module: nn.Module, args: Any, output: Any) -> None:
    inside.pop()


def _weights(params: dict[str, Moments], limit: int) -> Params:
    through = Propagation(limit)
    return {
        name: value.mean if value.variance is None else Uncertain(value, through, name)
        for name, value in params.items()
    }


class Uncertain(torch.Tensor):
    """A tensor of random values."""

    moments: Moments
    through: Propagation
    path: str | None  # name of the weight, or None of a result

    @staticmethod
    def __new__(cls, value: Moments, through: Propagation, path: str | None = None) -> Uncertain:
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
        if len(given) > 1 and func.__name__ in (*SHIFTS, *SCALINGS):
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


# --- rules for operations without weights ----------------------------------------------------------------------------
#
# A rule gets the operation and its arguments, in which the random one is a :class:`Moments`. Operations without a rule
# are refused by name.

KNOWN = (
    "linear layers, convolutions, ReLU, LeakyReLU, Tanh, Sigmoid, GELU, SiLU, ELU, Softplus, average and max pooling "
    "of equal windows without padding, flattening, dropout, and arithmetic with known numbers"
)
Operation = Callable[..., Any]
Rule = Callable[[Operation, tuple[Any, ...], dict[str, Any]], Moments]


class NoRule(Unsupported):
    """An operation whose effect on moments is not known."""

    def __init__(self, operation: str, layer: str = ""):
        self.operation = operation
        where = f"{layer}, which computes {operation}" if layer else operation
        super().__init__(f"Moments have no rule for {where}. There are rules for {KNOWN}. MeanFieldVI takes any layer.")


def apply_rule(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    """The moments of what an operation gives; exactly one of its arguments is a :class:`Moments`."""
    rule = RULES.get(func.__name__)
    if rule is None:
        raise NoRule(func.__name__)
    return rule(func, args, kwargs)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> tuple[Moments, dict[str, Any]]:
    """The input's moments, and the other arguments by name."""
    given = {**dict(zip(("input", *names), args, strict=False)), **kwargs}
    return given.pop("input"), given


# --- elementwise functions -------------------------------------------------------------------------------------------


def _rectify(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, given = _arguments(args, kwargs, "negative_slope")
    slope = given.get("negative_slope", 0.01) if "leaky" in func.__name__ else 0.0
    return moments.rectified(x, float(slope))


def _smooth(function: Callable[..., Tensor], *names: str) -> Rule:
    def rule(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
        x, given = _arguments(args, kwargs, *names)
        given.pop("inplace", None)
        return moments.smooth(partial(function, **given), x)

    return rule


def _drop(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, given = _arguments(args, kwargs, "p", "training")
    return moments.dropped(x, given.get("p", 0.5)) if given.get("training", True) else x


def _shift(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, mean = _known_arithmetic(func, args, kwargs)
    return Moments(mean, x.variance, x.covariance)


def _scale(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, mean = _known_arithmetic(func, args, kwargs)
    if len(args) == 1:  # a change of sign
        return Moments(mean, x.variance, x.covariance)
    first, second = args
    if "div" not in func.__name__:
        return moments.scaled(x, mean, second if first is x else first)
    if first is not x or kwargs:
        raise NoRule("a division by random values, or a rounded one")
    return moments.scaled(x, mean, 1.0 / second)


def _known_arithmetic(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Moments, Tensor]:
    x = next((each for each in args if isinstance(each, Moments)), None)
    if x is None or "other" in kwargs or kwargs.get("alpha", 1) != 1:
        raise NoRule(f"{func.__name__} with an argument by name")
    mean = func(*(each.mean if each is x else each for each in args), **kwargs)
    if mean.shape != x.mean.shape:
        raise NoRule(f"{func.__name__} that repeats random values")
    return x, mean


# --- shapes and pooling ----------------------------------------------------------------------------------------------


def _reshape(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, *rest = args
    mean = func(x.mean, *rest, **kwargs)
    if mean.shape[:1] != x.mean.shape[:1]:
        raise NoRule(f"{func.__name__} that does not keep rows apart")
    variance = None if x.variance is None else func(x.variance, *rest, **kwargs)
    return Moments(mean, variance, None if x.covariance is None else x.covariance.to(mean.dtype))


def _mean(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, given = _arguments(args, kwargs, "dim", "keepdim")
    dims = [dim % x.mean.dim() for dim in _each(given.get("dim") or (), 1)]
    if not dims or 0 in dims or x.covariance is not None:
        raise NoRule("a mean over rows, or over values whose covariances are followed")
    return moments.average(func(x.mean, **given), func(x.spread, **given), math.prod(x.mean.shape[d] for d in dims))


def _average_pool(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
    x, given = _arguments(args, kwargs, *names)
    if given.get("ceil_mode") or (any(_each(given.get("padding", 0), 1)) and not given.get("count_include_pad", True)):
        raise NoRule(f"{func.__name__} over windows of different sizes")
    count = given.get("divisor_override") or math.prod(_each(given["kernel_size"], x.mean.dim() - 2))
    return moments.average(func(x.mean, **given), func(x.spread, **given), count)


def _adaptive_pool(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, given = _arguments(args, kwargs, "output_size")
    mean = func(x.mean, **given)
    inside, outside = x.mean.shape[2:], mean.shape[2:]
    if any(size % parts for size, parts in zip(inside, outside, strict=True)):
        raise NoRule(f"{func.__name__} over windows of different sizes")
    return moments.average(mean, func(x.spread, **given), inside.numel() / outside.numel())


def _max_pool(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
    x, given = _arguments(args, kwargs, "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    n = x.mean.dim() - 2
    if any(_each(given.get("padding", 0), n)) or given.get("ceil_mode") or given.get("return_indices"):
        raise NoRule(f"{func.__name__} with padding, ceil_mode or return_indices")
    kernel = _each(given["kernel_size"], n)
    stride, dilation = _each(given.get("stride") or kernel, n), _each(given.get("dilation", 1), n)
    windows = list(zip(x.mean.shape[2:], kernel, stride, dilation, strict=True))
    counts = [(size - gap * (width - 1) - 1) // move + 1 for size, width, move, gap in windows]
    places = []
    for corner in itertools.product(*map(range, kernel)):  # the same place of every window
        first = [place * gap for place, gap in zip(corner, dilation, strict=True)]
        ends = [begin + (count - 1) * move + 1 for begin, count, move in zip(first, counts, stride, strict=True)]
        places.append((..., *map(slice, first, ends, stride)))
    parts = zip(parts_of(x.mean, places), parts_of(x.spread, places), strict=True)
    return moments.greatest([Moments(mean, variance) for mean, variance in parts])


def _each(value: Any, count: int) -> list[int]:
    """A number for each dimension, from one number or several."""
    if not isinstance(value, tuple | list):
        return [value] * count
    return list(value) * count if len(value) == 1 else list(value)


SHIFTS = ("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub")
SCALINGS = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "neg", "__neg__")
RESHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten", "contiguous", "clone", "to", "float")

RULES: dict[str, Rule] = {
    **dict.fromkeys(("relu", "relu_", "leaky_relu", "leaky_relu_"), _rectify),
    **dict.fromkeys(("tanh", "tanh_"), _smooth(torch.tanh)),
    **dict.fromkeys(("sigmoid", "sigmoid_"), _smooth(torch.sigmoid)),
    "gelu": _smooth(F.gelu, "approximate"),
    "silu": _smooth(F.silu, "inplace"),
    "elu": _smooth(F.elu, "alpha", "inplace"),
    "softplus": _smooth(F.softplus, "beta", "threshold"),
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _drop),
    **dict.fromkeys(SHIFTS, _shift),
    **dict.fromkeys(SCALINGS, _scale),
    **dict.fromkeys(RESHAPES, _reshape),
    "mean": _mean,
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _average_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), _adaptive_pool),
    **dict.fromkeys(("max_pool1d", "max_pool2d"), _max_pool),
}
