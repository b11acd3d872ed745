"""Targets made ready at the door: cast, shaped, finite, in range; an error names the row and the value."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.core.model.likelihood import align_target, check_finite_target
from knowable.errors import InvalidData


def as_numbers(y: Tensor, output: Tensor, trailing: torch.Size | tuple[int, ...], *, name: str) -> Tensor:
    """Give ``y`` the shape ``(rows, *trailing)`` and the dtype and device of ``output``; refuse what is not finite."""
    aligned = align_target(check_has_rows(y, name=name), trailing, name=name)
    return check_finite_target(aligned.to(dtype=output.dtype, device=output.device), name=name)


def check_has_rows(y: Tensor, *, name: str) -> Tensor:
    """Refuse a target without a row dimension."""
    if y.dim() == 0:
        raise InvalidData(f"{name} must have one row for each example, got the single number {y.item()}.")
    return y


def refuse_where(bad: Tensor, y: Tensor, *, name: str, expected: str, advice: str) -> None:
    """Raise if any element is ``bad``, naming the first one, its row and what was ``expected``."""
    if not bad.any():
        return
    row, *inside = torch.nonzero(bad)[0].tolist()
    value = f"{y[(row, *inside)].item():.10g}"
    where = f"row {row}, position {tuple(inside)}" if inside else f"row {row}"
    raise InvalidData(f"{name} must be {expected}, got {value} in {where} (counting from 0). {advice}")
