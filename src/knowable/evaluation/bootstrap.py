"""Standard errors of scores that are no means over rows, by resampling the rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from knowable.core.support.randomness import generator_for

RESAMPLES = 200
_AT_ONCE = 2_000_000


def bootstrap_error(
    rows: Tensor, statistic: Callable[[Tensor], Tensor], *, resamples: int = RESAMPLES, seed: int = 0
) -> float:
    """Standard error of a statistic of sums over rows (Efron, 1979); all pixels of a row are drawn together.

    Args:
        rows: What each row adds to the sums, ``(B, d)``.
        statistic: From sums ``(R, d)`` to values ``(R,)``.
        resamples: How many data sets of B rows are drawn with replacement.
        seed: Fixes the draws.

    Returns:
        The standard deviation over the data sets; NaN with a single row.
    """
    count = len(rows)
    if count < 2:
        return math.nan
    rows, generator = rows.double().cpu(), generator_for(seed, "bootstrap")
    block = max(1, _AT_ONCE // count)
    sums = []
    for first in range(0, resamples, block):
        number = min(block, resamples - first)
        drawn = torch.randint(count, (number, count), generator=generator)
        times = torch.zeros((number, count), dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones(drawn.shape).double()
        )
        sums.append(times @ rows)
    return statistic(torch.cat(sums)).std().item()
