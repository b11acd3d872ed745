"""Second moments of many vectors."""

from __future__ import annotations

import torch
from torch import Tensor

_NARROWEST = 128  # of a block: products of thinner matrices are slow
_BLOCKS = 8  # at the most


def second_moment(values: Tensor) -> Tensor:
    r"""The sum of :math:`v v^\top` over vectors v that are ``values[..., :]``: ``(n, n)``.

    Args:
        values: ``(..., n)``; with three dimensions or more, the one before the last holds positions.
    """
    count = values.shape[-1]
    if values.dim() > 2 and values.shape[-2] > count:  # positions: many small matrices, none of which is copied
        return (values.mT @ values).flatten(0, -3).sum(0)
    in_order = values.stride(-1) == 1  # otherwise features come first in memory, as convolutions have them
    return _gram(values.reshape(-1, count).T if in_order else values.movedim(-1, 0).reshape(count, -1))


def _gram(wide: Tensor) -> Tensor:
    """``wide`` ``(n, vectors)`` times its transpose, of which only blocks on and below the diagonal are computed."""
    count = len(wide)
    found = wide.new_empty((count, count))
    start = 0
    for rows in wide.tensor_split(min(_BLOCKS, max(1, count // _NARROWEST))):
        stop = start + len(rows)
        torch.mm(rows, wide[:stop].T, out=found[start:stop, :stop])
        found[:start, start:stop] = found[start:stop, :start].T
        start = stop
    return found
