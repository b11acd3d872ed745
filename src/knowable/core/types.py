"""Type aliases used everywhere."""

from __future__ import annotations

from torch import Tensor

Params = dict[str, Tensor]
"""Parameters by name. A stack of K draws is the same dict with a leading dimension of size K in every tensor."""

Buffers = dict[str, Tensor]
"""A network's buffers by name (running statistics of batch normalisation and the like)."""
