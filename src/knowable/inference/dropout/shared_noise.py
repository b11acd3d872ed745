"""Random numbers inside a network, drawn once for all rows.

Some dropout is no distribution over weights: dropout of attention weights, dropout before a residual connection, and
calls of ``F.dropout`` in the network's own code. A draw of such a network is a draw of its random numbers. So that a
draw is one function of the input, like a draw of the weights, the random numbers must be the same for every row and not
depend on the other rows of a batch: under :class:`SharedNoise` random operations draw for a single row, and all rows
share the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Params
from knowable.core.support.randomness import own_randomness

Axis = tuple[int, int]
"""The dimension of a random tensor along which rows are, and how many of its entries belong to each row."""

_ROWS = (2, 3)
_ATEN: Any = torch.ops.aten
_FILLS = frozenset({_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.exponential_.default})
_ALIKE = frozenset({_ATEN.rand_like.default, _ATEN.randn_like.default, _ATEN.bernoulli.p})


def turn_on_noise(network: Network) -> None:
    """Let the copy for evaluation draw random numbers as in training; it still uses running statistics."""
    in_training = network.modules(training=True)
    for path, module in network.modules(training=False).items():
        module.training = in_training[path].training and not isinstance(module, _NormBase)


def random_axes(network: Network, params: Params, x: Tensor, buffers: Buffers) -> list[Axis | None]:
    """The row axis of each random operation of a forward pass, in order; None where there is none.

    The list is empty if nothing in the network is random.
    """
    seen = []
    for rows in _ROWS:
        watch = _RandomShapes()
        with own_randomness(0), torch.no_grad(), plain_attention(), watch:
            network(params, x[torch.arange(rows, device=x.device) % len(x)], buffers=buffers)
        seen.append(watch.shapes)
    if len(seen[0]) != len(seen[1]):
        return [None] * len(seen[1])  # the number of draws depends on the data: each row draws its own
    return [_axis(first, second) for first, second in zip(*seen, strict=True)]


def plain_attention() -> AbstractContextManager[Any]:
    """Inside this block, attention is computed by single operations, its dropout among them."""
    return sdpa_kernel(SDPBackend.MATH)


class SharedNoise(TorchDispatchMode):
    """Inside this block, random operations draw for one row, and all rows share the draw; see :func:`random_axes`."""

    def __init__(self, axes: Sequence[Axis | None]):
        super().__init__()
        self._axes = iter(axes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, or its shared version."""
        kwargs = kwargs or {}
        axis = next(self._axes, None) if _is_random(func) else None
        if axis is None:
            return func(*args, **kwargs)
        if func is _ATEN.native_dropout.default:
            return _shared_dropout(*args, axis=axis)
        if func in _FILLS:
            own = _for_one_row(args[0], axis)
            func(own, *args[1:], **kwargs)
            return args[0].copy_(_for_all_rows(own, args[0].shape, axis))
        if func in _ALIKE:
            own = func(_for_one_row(args[0], axis), *args[1:], **kwargs)
            return _for_all_rows(own, args[0].shape, axis)
        return func(*args, **kwargs)  # each row draws its own


class _RandomShapes(TorchDispatchMode):
    """Records the shapes that random operations draw."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_random(func):
            first = result[0] if isinstance(result, tuple) else result
            self.shapes.append(first.shape)
        return result


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _axis(first: torch.Size, second: torch.Size) -> Axis | None:
    """The one dimension that grew with the rows: from a multiple of 2 to the same multiple of 3."""
    grown = [d for d, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
    if len(first) != len(second) or len(grown) != 1:
        return None
    d = grown[0]
    per_row, rest = divmod(first[d], _ROWS[0])
    return (d, per_row) if rest == 0 and second[d] == per_row * _ROWS[1] else None


def _for_one_row(like: Tensor, axis: Axis) -> Tensor:
    """An empty tensor for the random numbers of one row."""
    dim, per_row = axis
    return like.new_empty((*like.shape[:dim], per_row, *like.shape[dim + 1 :]))


def _for_all_rows(value: Tensor, shape: torch.Size, axis: Axis) -> Tensor:
    dim, per_row = axis
    rows = shape[dim] // per_row
    return value.unsqueeze(dim).expand(*shape[:dim], rows, per_row, *shape[dim + 1 :]).reshape(shape)


def _shared_dropout(x: Tensor, rate: float, train: bool | None, *, axis: Axis) -> tuple[Tensor, Tensor]:
    """``native_dropout``, as dropout runs on a GPU, with one mask for all rows."""
    if train is False or rate in (0.0, 1.0):
        return _ATEN.native_dropout.default(x, rate, train)
    own = _for_one_row(x, axis).bernoulli_(1 - rate)
    mask = _for_all_rows(own, x.shape, axis)
    return x * mask / (1 - rate), mask.bool()
