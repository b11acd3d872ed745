"""Whether held-out data were used for training: hashes of training rows, kept with the posterior.

What is measured on training rows says nothing about new ones, so calibration and certificates must not use them. A
posterior keeps 64-bit hashes of its training rows, of a random sample where there are many. They take little memory,
are saved with it, and do not give the rows away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.model.data import Data, as_data
from knowable.core.model.row_hashes import row_hashes
from knowable.core.network.inputs import tensors_of
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidData

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior

_MOST_ROWS = 8192  # that are hashed at a fit,
_MOST_VALUES = 50_000_000  # and their numbers in all


@dataclass(frozen=True)
class TrainingRows:
    """Hashes of the rows that a posterior was fitted to, or of a random sample of them.

    Attributes:
        hashes: Hashes of the rows that occur once, sorted.
        size: How many rows there were.
        hashed: How many of them were hashed.
        twice: How many different rows occur twice among them: where features are few and discrete, a new row may equal
            one of training by chance, and this says how often.
    """

    hashes: Tensor
    size: int
    hashed: int
    twice: int

    @classmethod
    def of(cls, data: Data) -> TrainingRows | None:
        """Of the data of a fit; of a loader, of the rows that were kept. None if there are none."""
        rows = data if data.in_memory else data.kept if data._stream.was_read else None
        if rows is None:
            return None
        x, y = rows.tensors[:2]
        width = sum(each[0].numel() for each in tensors_of(x, y))
        most = max(1, min(_MOST_ROWS, _MOST_VALUES // max(1, width)))
        if len(y) > most:
            chosen = torch.randperm(len(y), generator=generator_for(0, "training rows"))[:most].to(y.device)
            x, y = x.index_select(0, chosen), y.index_select(0, chosen)
        found, counts = row_hashes(x, y).unique(return_counts=True)
        return cls(found[counts == 1], data.size, len(y), int((counts == 2).sum()))

    def joined(self, other: TrainingRows | None) -> TrainingRows:
        """With the rows of another data set that had a part in the posterior."""
        if other is None:
            return self
        hashes = torch.cat([self.hashes, other.hashes]).unique()
        return TrainingRows(hashes, self.size + other.size, self.hashed + other.hashed, self.twice + other.twice)

    def tensors(self) -> dict[str, Tensor]:
        """For an artifact."""
        return {"hashes": self.hashes, "counts": torch.tensor([self.size, self.hashed, self.twice])}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> TrainingRows | None:
        """Back from an artifact; None for one of an earlier version."""
        if not tensors:
            return None
        hashes, counts = tensors["hashes"].cpu(), tensors["counts"]
        if (hashes.dtype, hashes.dim(), counts.dtype) != (torch.int64, 1, torch.int64) or bool((counts < 0).any()):
            raise ValueError("hashes and counts of training rows must be whole numbers")
        return cls(hashes, *counts.tolist())


def overlap(posterior: Posterior, data: Any) -> int | None:
    """How many rows of ``data`` equal a training row of the posterior, in x and y.

    It is a lower bound where there were more training rows than are kept. None if the training rows are not known: the
    posterior is of an earlier version, or its loader's rows could not be kept.

    Args:
        posterior: A fitted posterior.
        data: ``(x, y)`` tensors or arrays, a Dataset or a DataLoader.
    """
    known = posterior.training_rows
    if known is None:
        return None
    rows = as_data(data, posterior.model, name="held_out")
    return sum(_found(known, *batch[:2]) for batch in rows)


def refuse_training_rows(posterior: Posterior, data: Any, *, name: str = "held_out") -> None:
    """Raise if ``data`` has more rows in common with the training data than chance explains.

    A new row equals a training row that occurs once with a probability of about 2 N₂ / N, where N₂ of N rows occur
    twice (Good, 1953). Four standard errors are added, and a few rows: real data have some duplicates.
    """
    rows = as_data(data, posterior.model, name=name)
    found, known = overlap(posterior, rows), posterior.training_rows
    if not found or known is None:
        return
    by_chance = rows.size * 2 * (known.twice + 1) / known.hashed
    all_of_them = found == rows.size and not known.twice
    if all_of_them or found > max(1, by_chance + 4 * math.sqrt(by_chance)):
        more = "At least " if known.hashed < known.size else ""
        raise InvalidData(
            f"{more}{found:,} of the {rows.size:,} rows of {name} are rows that the posterior was fitted to. On them "
            f"it looks better than on new ones. Pass rows that were kept apart from training."
        )


def _found(known: TrainingRows, x: Tensor, y: Tensor) -> int:
    return int(torch.isin(row_hashes(x, y), known.hashes).sum())
