"""A few rows that stand for many: drawn at random, or the centres of a greedy cover (Gonzalez, 1985)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument


@dataclass(frozen=True)
class Coreset:
    """How rows are kept of each task.

    Args:
        size: Number of rows of each task.
        choose: ``"random"``, or ``"k_centre"``: each row is the one furthest from those chosen before it.

    >>> Coreset(200, choose="k_centre")
    Coreset(size=200, choose='k_centre')
    """

    size: int
    choose: str = "random"

    def __post_init__(self) -> None:
        check_count("size", self.size)
        check_choice("choose", self.choose, ("random", "k_centre"))

    def indices(self, x: Tensor, *, seed: int = 0) -> Tensor:
        """Which rows of ``x`` are kept, ``(size,)``."""
        if self.size >= len(x):
            raise InvalidArgument(f"coreset must be smaller than the task, which has {len(x)} rows; got {self.size}.")
        if self.choose == "k_centre":
            return k_centre(x, self.size, seed=seed)
        return torch.randperm(len(x), generator=generator_for(seed, "coreset"))[: self.size]


def k_centre(x: Tensor, count: int, *, chosen: Tensor | None = None, seed: int = 0) -> Tensor:
    r"""Rows that cover ``x``: each is the furthest from all before it, at most twice as far as the best cover allows.

    .. math:: i_{k+1} = \arg\max_i \min_{j \le k} \|x_i - x_{i_j}\|

    Args:
        x: Inputs or features, ``(N, ...)``; the distance is Euclidean over everything behind the rows.
        count: How many rows, at most N.
        chosen: Rows that are covered already, ``(m, ...)``; without them the first row is drawn at random.
        seed: Of that draw.

    Returns:
        Indices of rows, ``(count,)``, in the order in which they were chosen. The cost is ``count`` passes over x.
    """
    check_count("count", count, at_most=len(x))
    flat = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    away = torch.full((len(flat),), torch.inf, dtype=flat.dtype, device=flat.device)
    for row in () if chosen is None else chosen.flatten(1).to(flat):
        away = torch.minimum(away, (flat - row).square().sum(1))
    found: list[int] = []
    while len(found) < count:
        if not found and chosen is None:
            nearest = int(torch.randint(len(flat), (), generator=generator_for(seed, "k-centre")))
        else:
            nearest = int(away.argmax())
        found.append(nearest)
        away = torch.minimum(away, (flat - flat[nearest]).square().sum(1))
        away[nearest] = -1.0  # never chosen again, also where rows are equal
    return torch.tensor(found, device=x.device)
