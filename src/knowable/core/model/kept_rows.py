"""A bounded random sample of the rows of a loader, kept while a pass goes through it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

LIMIT = 64 * 2**20  # bytes of rows that are kept of a loader, at most


class KeptRows:
    """All rows of a pass, or as many of them as have 64 MB, chosen at random without replacement.

    Every row gets a random key. Where the rows with keys above the threshold take more than the limit, the threshold
    rises to the median of their keys. What is kept are thus the rows with the largest keys, whatever their order was.
    """

    def __init__(self, generator: torch.Generator):
        self.seen = 0  # rows that passed by
        self.whole = False  # whether the pass went to its end
        self._generator, self._threshold, self._bytes = generator, 0.0, 0
        self._batches: list[tuple[Tensor, ...]] = []
        self._keys: list[Tensor] = []

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def take(self, batch: tuple[Tensor, ...]) -> None:
        """Keep some rows of a batch: copies, which do not change with the loader's own memory."""
        keys = torch.rand(len(batch[0]), generator=self._generator, dtype=torch.float64)
        self.seen += len(keys)
        self._add(batch, keys)
        while self._bytes > LIMIT and len(self) > 1:
            self._threshold = torch.cat(self._keys).median().item()
            before = list(zip(self._batches, self._keys, strict=True))
            self._batches, self._keys, self._bytes = [], [], 0
            for each in before:
                self._add(*each)

    def _add(self, batch: tuple[Tensor, ...], keys: Tensor) -> None:
        chosen = (keys > self._threshold).nonzero().flatten()
        if len(chosen):
            own = tuple(each.index_select(0, chosen.to(each.device)) for each in batch)
            self._batches.append(own)
            self._keys.append(keys[chosen])
            self._bytes += sum(each.numel() * each.element_size() for each in tree_leaves(own))

    def joined(self) -> tuple[Tensor, ...] | None:
        """The rows as one batch, in the order in which they came; None where their shapes differ between batches."""
        if len(self._batches) > 1:
            shapes = [[each.shape[1:] for each in tree_leaves(batch)] for batch in self._batches]
            if any(each != shapes[0] for each in shapes):
                return None
            self._batches = [tuple(torch.cat(each) for each in zip(*self._batches, strict=True))]
            self._keys = [torch.cat(self._keys)]
        return self._batches[0] if self._batches else None

    @property
    def batches(self) -> list[tuple[Tensor, ...]]:
        """The rows as they came, those of a batch together."""
        return self._batches
