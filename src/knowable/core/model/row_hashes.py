"""Hashes of rows, which are the same on every machine and wherever a row stands."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.network.inputs import tensors_of

_VALUES_AT_ONCE = 200_000  # that fit into a processor's cache


def row_hashes(x: Tensor, y: Tensor) -> Tensor:
    """A hash of each row, ``(rows,)`` of int64 on the CPU; the same on every machine."""
    flat = [each.flatten(1) if each.dim() > 1 else each.unsqueeze(1) for each in tensors_of(x, y)]
    total, first = torch.zeros(len(y), dtype=torch.int64), 0
    for each in flat:
        if each.shape[1]:
            factors = _mixed(torch.arange(first, first + each.shape[1], device=each.device))
            parts = each.split(max(1, _VALUES_AT_ONCE // each.shape[1]))
            total += torch.cat([(_mixed(_bits(part)) * factors).sum(1) for part in parts]).cpu()
        first += each.shape[1]
    return total


def _bits(values: Tensor) -> Tensor:
    """Numbers as integers that are equal where the numbers are."""
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if not values.is_floating_point():
        return values.long()
    return (values.double() + 0.0).view(torch.int64)  # + 0.0: a negative zero is a zero


def _mixed(bits: Tensor) -> Tensor:
    """A bijection of int64 that spreads differences over all bits (Steele, Lea and Flood, 2014)."""
    bits = (bits + 1) * -7046029254386353131
    bits = (bits ^ (bits >> 30)) * -4658895280553007687
    bits = (bits ^ (bits >> 27)) * -7723592293110705685
    return bits ^ (bits >> 31)
