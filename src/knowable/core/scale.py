"""The scale field that priors share: a positive number, or a tensor when it is learned."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from knowable.core.checks import check_number

Scale = float | Tensor
"""A positive scale. Users give a number; a learned scale is a tensor."""


def check_scale(name: str, value: Any) -> Scale:
    """Return ``value`` as a positive float; a tensor is a learned scale, positive by construction, and passes."""
    return value if isinstance(value, Tensor) else check_number(name, value, above=0.0)


def log_of(scale: Scale) -> Scale:
    """The logarithm of a scale, of the same kind."""
    return scale.log() if isinstance(scale, Tensor) else math.log(scale)
