"""Layers without weights, by the operation they perform: which rule of moments replaces it.

A rule gets the operation and its arguments, in which the random one is a :class:`Moments`. What has no rule, or has one
only for other settings, is refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.errors import Unsupported
from knowable.inference.variational import moments
from knowable.inference.variational.moment_activations import parts_of
from knowable.inference.variational.moments import Moments

KNOWN = (
    "linear layers, convolutions, ReLU, LeakyReLU, Tanh, Sigmoid, GELU, SiLU, ELU, Softplus, average and max pooling "
    "of equal windows without padding, flattening, dropout, and arithmetic with known numbers"
)
Operation = Callable[..., Any]
Rule = Callable[[Operation, tuple[Any, ...], dict[str, Any]], Moments]


class NoRule(Unsupported):
    """An operation whose effect on moments is not known.

    Attributes:
        operation: What it is called.
    """

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


def _stretch(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moments:
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
STRETCHES = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "neg", "__neg__")
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
    **dict.fromkeys(STRETCHES, _stretch),
    **dict.fromkeys(RESHAPES, _reshape),
    "mean": _mean,
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _average_pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d"), _adaptive_pool),
    **dict.fromkeys(("max_pool1d", "max_pool2d"), _max_pool),
}
