"""Time of an exact linear model of a million rows with 50 features, beside NumPy's own normal equations.

NumPy's is the least that has to be done: a column of ones, XᵀX, Xᵀy, one solve. ``ExactLinear`` also checks the data,
and gives the posterior, its predictive distribution and the evidence. Where the rows come in batches, both go through
the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Plan, Step

FEATURES, NOISE = 50, 0.5
_BATCH = 10_000


def cases(*, quick: bool) -> list[Case]:
    """Rows in memory, and in one pass over batches."""
    rows = 5_000 if quick else 1_000_000
    return [
        Case(
            name="million",
            title=f"A linear model of {rows:,} x {FEATURES}, in memory and in batches of {_BATCH:,}",
            contenders={
                "NumPy": partial(numpy_fit, rows, batched=False),
                "ExactLinear": partial(knowable_fit, rows, batched=False),
                "NumPy, batches": partial(numpy_fit, rows, batched=True),
                "ExactLinear, batches": partial(knowable_fit, rows, batched=True),
            },
            reference="NumPy",
            plan=Plan(rounds=7, inner=1, warmup=1),
            note="NumPy solves for the posterior mean; ExactLinear also gives covariance, evidence and predictions.",
        )
    ]


def numpy_fit(rows: int, *, batched: bool) -> Step:
    """The posterior mean by the normal equations, with a standard normal prior."""
    x, y = _data(rows)
    everything = [(x.numpy(), y.numpy())]

    def step() -> np.ndarray:
        gram, cross = np.eye(FEATURES + 1) * NOISE**2, np.zeros((FEATURES + 1, 1))
        parts = ((a.numpy(), b.numpy()) for a, b in _Batches(x, y)) if batched else everything
        for inputs, targets in parts:
            design = np.hstack([inputs, np.ones((len(inputs), 1))])
            gram += design.T @ design
            cross += design.T @ targets
        return np.linalg.solve(gram, cross)

    return step


def knowable_fit(rows: int, *, batched: bool) -> Step:
    """A fit of ``ExactLinear``, which returns the posterior."""
    import knowable as kn

    x, y = _data(rows)
    data = kn.Data(_Batches(x, y), size=rows) if batched else (x, y)
    model = kn.Model(nn.Linear(FEATURES, 1).double(), kn.Gaussian(NOISE))
    return lambda: kn.ExactLinear().fit(model, data)


class _Batches:
    """The rows in order, some at a time: an iterable that can be read again."""

    def __init__(self, x: Tensor, y: Tensor):
        self.pair = x, y

    def __len__(self) -> int:
        return -(-len(self.pair[0]) // _BATCH)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*(each.split(_BATCH) for each in self.pair), strict=True)


@lru_cache(maxsize=1)
def _data(rows: int) -> tuple[Tensor, Tensor]:
    """Shared by the contenders: at full size it takes 400 MB."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((rows, FEATURES), generator=generator, dtype=torch.float64)
    noise = NOISE * torch.randn((rows, 1), generator=generator, dtype=torch.float64)
    return x, x[:, :5].sum(1, keepdim=True) + noise
