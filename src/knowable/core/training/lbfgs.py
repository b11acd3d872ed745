"""The last way to a minimum by L-BFGS (Liu and Nocedal, 1989), where the loss is a smooth function of all rows.

Adam is good at coming near a minimum and slow at reaching it: its steps have the size of the learning rate, whatever
the curvature is. L-BFGS learns the curvature from differences of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ITERATIONS = 100  # of a round, after which it restarts
_MEMORY = 30  # differences of gradients


@dataclass(frozen=True)
class Round:
    """What one round of L-BFGS did."""

    loss: float  # where it ended
    gain: float  # by how much that is less than before
    evaluations: int  # of the loss and its gradient
    ended: bool  # whether it stopped by itself, as no step led further down


def lbfgs_round(params: Sequence[Tensor], loss: Callable[[], Tensor]) -> Round:
    """Up to 100 iterations with a line search (strong Wolfe conditions); ``params`` are changed in place.

    Where the loss is not finite, or ends higher than it began, they are put back, and the gain is 0.

    Args:
        params: What is to be found.
        loss: The loss at the present ``params``.
    """
    search = torch.optim.LBFGS(
        params, max_iter=_ITERATIONS, history_size=_MEMORY, tolerance_grad=1e-9, tolerance_change=1e-12,
        line_search_fn="strong_wolfe",
    )  # fmt: skip
    before = [value.detach().clone() for value in params]
    values: list[float] = []

    def closure() -> Tensor:
        search.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        values.append(value.item())
        return value

    search.step(closure)
    with torch.no_grad():
        last = loss().item()
    first = values[0]
    if not (math.isfinite(last) and last <= first and all(torch.isfinite(value).all() for value in params)):
        with torch.no_grad():
            for value, old in zip(params, before, strict=True):
                value.copy_(old)
        return Round(first, 0.0, len(values), False)
    iterations = search.state[params[0]]["n_iter"]
    return Round(last, first - last, len(values), iterations < _ITERATIONS)
