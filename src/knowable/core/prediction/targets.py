"""Targets cast, shaped and checked once: an error names the argument, the row and the value."""

from __future__ import annotations

import torch
from torch import Tensor

from knowable.errors import InvalidData


def align_target(y: Tensor, trailing: torch.Size | tuple[int, ...], *, name: str = "y") -> Tensor:
    """Give ``y`` the shape ``(rows, *trailing)``: a column vector and a plain vector are the same thing.

    This is where the classic mistake is caught: ``(B,)`` against ``(B, 1)`` would broadcast to ``(B, B)``.
    """
    if y.dim() == 0:
        raise InvalidData(f"{name} must have one row for each example, got the single number {y.item()}.")
    wanted = (y.shape[0], *trailing)
    if tuple(y.shape) == wanted:
        return y
    squeezed = tuple(size for size in trailing if size != 1)
    if tuple(size for size in y.shape[1:] if size != 1) == squeezed:
        return y.reshape(wanted)
    raise InvalidData(
        f"{name} has shape {tuple(y.shape)}, but the network's output for that many rows has shape {wanted}. "
        f"Reshape {name}, or change the network's last layer."
    )


def sum_over_event(values: Tensor, *, batch_dims: int = 1) -> Tensor:
    """Sum everything behind the batch dimensions."""
    return values.flatten(batch_dims).sum(-1) if values.dim() > batch_dims else values


def check_finite_target(y: Tensor, *, name: str = "y") -> Tensor:
    """Raise if ``y`` has missing or infinite values, saying in which rows."""
    bad = ~torch.isfinite(y)
    if bad.any():
        rows = bad.flatten(1).any(1) if y.dim() > 1 else bad
        where = torch.nonzero(rows).flatten().tolist()
        more = f" and {len(where) - 5} more" if len(where) > 5 else ""
        raise InvalidData(
            f"{name} has missing or infinite values in row {', '.join(map(str, where[:5]))}{more} "
            f"(counting from 0). Drop or fill these rows."
        )
    return y


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
