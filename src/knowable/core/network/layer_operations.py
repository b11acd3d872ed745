"""The operations of layers: which functions of torch are linear maps and convolutions, and what their operands are.

Methods that change what a layer does with its weights, without changing the network, look for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR = F.linear
CONVOLUTIONS = frozenset(
    getattr(module, f"conv{kind}{n}d") for module in (F, torch) for kind in ("", "_transpose") for n in (1, 2, 3)
)
METADATA = frozenset(
    {
        "__get__",
        "size",
        "dim",
        "stride",
        "numel",
        "__len__",
        "is_floating_point",
        "is_complex",
        "ndimension",
        "__repr__",
    }
)
"""Names of functions that ask a tensor about itself and compute nothing."""

_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


def is_transposed(op: Callable[..., Any]) -> bool:
    """Whether ``op`` is a transposed convolution, whose weight has its inputs first."""
    return "transpose" in op.__name__


def operands(
    op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Input, weight, bias and the other arguments of a linear or convolution call, by name."""
    names = _TRANSPOSED if is_transposed(op) else _ARGUMENTS
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.pop("input"), given.pop("weight"), given.pop("bias", None), given
