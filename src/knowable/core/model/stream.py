"""A loader as passes over checked batches: one for each epoch, and none for a glimpse.

What looks at the first batch gets that of the next epoch, which goes on from there. What wants some of the rows gets
those kept of the first pass, a random sample of bounded size.

Where several processes have different rows, an epoch is of this process's own, and everything else is of all: the first
batch is that of the first process, a whole pass goes through the processes in turn, and the rows kept are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from knowable.core.model.checking import checked_pair, targets_of
from knowable.core.model.row_hashes import row_hashes
from knowable.core.model.row_source import RowSource
from knowable.core.model.row_weights import weights_of_classes
from knowable.core.network.inputs import as_rows, tupled
from knowable.core.support.processes import ALONE, Processes
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidData

if TYPE_CHECKING:
    from knowable.core.model.model import Model

Batch = tuple[Tensor, ...]
"""``(x, y)``, or ``(x, y, weights)`` where rows have weights."""

TargetShape = tuple[int, ...] | dict[str, tuple[int, ...]] | None
"""Shape of one target as the user gave it, by name where there are several; None where it is not known."""

TargetName = str | Sequence[str] | None
"""Where batches are dicts: which entry is the target, or which are."""

SEVERAL = " Several inputs go in a tuple or a dict: ((a, b), y)."
CHUNK = 4096  # rows per batch where no gradient is needed, at most
LIMIT = 64 * 2**20  # bytes of rows that are kept of a loader, at most


class Stream:
    """A loader whose batches are cast and checked for the model as they come, and what is kept of them.

    Its first batch is kept, and a random sample of the rows of its first whole pass. An iterator that was opened to
    look at the first batch waits, and the next epoch goes on with it.
    """

    def __init__(
        self,
        loader: Any,
        size: int,
        model: Model | None = None,
        name: str = "data",
        class_weights: Tensor | None = None,
        target: TargetName = None,
        processes: Processes = ALONE,
    ):
        self.loader, self.size, self.model, self.name = loader, size, model, name
        self.class_weights, self.target, self.processes = class_weights, target, processes
        self.target_shape: TargetShape = None  # known from the first batch on
        self._outputs: dict[Any, Tensor] = {}  # of the network, by the shape of rows
        self._first: Batch | None = None
        self._first_of_all: Batch | None = None
        self._waiting: Iterator[Batch] | None = None  # has given the first batch, and no other
        self._kept: KeptRows | None = None
        self._kept_of_all: KeptRows | None = None
        self.limit = LIMIT  # bytes of rows that are kept

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def was_read(self) -> bool:
        """Whether there was a whole pass."""
        return self._kept is not None and self._kept.whole

    @property
    def first(self) -> Batch:
        """The first batch that it gives; of several processes, that of the first one."""
        if self._first_of_all is None:
            self._first_of_all = self.processes.from_first(lambda: self._own_first)
        return self._first_of_all

    @property
    def _own_first(self) -> Batch:
        if self._first is None:
            self._waiting = self._opened(self.loader)
            found = next(self._waiting, None)
            if found is None:
                raise InvalidData(
                    f"{self.name} gave no batch: an iterator that can be read only once? Pass a DataLoader."
                )
            self._first = _copied(found)
        return self._first

    @property
    def rows_of_batches(self) -> int:
        """Number of rows of a batch: what the loader says, or those of the first."""
        if isinstance(self.loader, DataLoader) and self.loader.batch_size is not None:
            return self.loader.batch_size
        return max(1, len(self._own_first[1]))

    def kept(self) -> KeptRows:
        """The rows kept; where there was no pass yet, after one."""
        if self._kept is None:
            for _ in self.own_whole():
                pass
        assert self._kept is not None
        if not self.processes.several:
            return self._kept
        if self._kept_of_all is None or not self._kept_of_all.whole:
            self._kept_of_all = KeptRows.of_all(self.processes.gather(self._kept), self.limit)
        return self._kept_of_all

    def epoch(self, seed: int = 0, *, goes_on: bool = True) -> Iterator[Batch]:
        """One epoch in the loader's own order; if it ``goes_on``, with the iterator that waits."""
        waiting, self._waiting = self._waiting, None
        if waiting is None or not goes_on:
            return self._passed(self._opened(self.loader), seed)
        return self._passed(chain([_copied(self._own_first)], waiting), seed)

    def whole(self) -> Iterator[Batch]:
        """Every row once, in order: without shuffling and without dropping the last batch."""
        yield from self.processes.in_turn(self.own_whole())

    def own_whole(self) -> Iterator[Batch]:
        """The same of the rows that are this process's own."""
        loader = in_order(self.loader)
        return self.epoch() if loader is self.loader else self._passed(self._opened(loader), 0)

    def _passed(self, batches: Iterator[Batch], seed: int) -> Iterator[Batch]:
        """A pass, of which rows are kept if there was no whole one before."""
        mine = None
        if not self.was_read:
            own = (self.processes.rank,) if self.processes.rank else ()
            generator = generator_for(seed, "kept rows", *own)
            limit = self.limit // self.processes.count
            mine = self._kept = KeptRows(generator, limit, shuffled=shuffles(self.loader))
        length = length_of(self.loader)
        for number, batch in enumerate(batches, 1):
            if self._first is None:
                self._first = _copied(batch)
            if mine is not None:
                mine.take(batch)
                mine.whole = mine.seen >= self.size or number == length
            yield batch
        if mine is not None:
            mine.whole = mine.seen > 0

    def _opened(self, loader: Any) -> Iterator[Batch]:
        """The batches of one epoch: all, or N rows where the loader has no length (and perhaps no end)."""
        batches = self._checked(loader)
        return batches if length_of(self.loader) is not None else _first_rows(batches, self.size)

    def _checked(self, loader: Any) -> Iterator[Batch]:
        for batch in loader:
            x, y = pair_of(batch, self.target)
            if self.model is None:
                yield as_rows(x), as_rows(y, "y")
                continue
            if self.target_shape is None:
                self.target_shape = shape_of(targets_of(y, self.model))
            x, y = checked_pair(x, y, self.model, self.name, self._outputs)
            yield (
                (x, y) if self.class_weights is None else (x, y, weights_of_classes(self.class_weights, y, self.model))
            )


def shape_of(y: Tensor) -> TargetShape:
    """Shape of one target, by name where there are several."""
    if isinstance(y, Tensor):
        return tuple(y.shape[1:])
    return {name: tuple(each.shape[1:]) for name, each in y.tree.items()}


def _copied(batch: Batch) -> Batch:
    return tuple(each.clone() for each in batch)


class KeptRows:
    """All rows of a pass, or as many of them as have ``limit`` bytes, chosen at random without replacement.

    Every row gets a random key. Where the rows with keys above the threshold take more than the limit, the threshold
    rises to the median of their keys. What is kept are thus the rows with the largest keys, whatever their order was.
    """

    def __init__(self, generator: torch.Generator, limit: int, *, shuffled: bool = False):
        self.limit = limit
        self.seen = 0  # rows that passed by
        self.whole = False  # whether the pass went to its end
        self._generator, self._threshold, self._bytes, self._shuffled = generator, -1.0, 0, shuffled
        self._batches: list[Batch] = []
        self._keys: list[Tensor] = []
        self._joined = False  # into one batch

    @classmethod
    def of_all(cls, parts: Sequence[KeptRows], limit: int) -> KeptRows:
        """A random sample of all rows from those that several processes kept of theirs."""
        found = cls(parts[0]._generator, limit, shuffled=parts[0]._shuffled)
        found._threshold = max(each._threshold for each in parts)
        found.seen, found.whole = sum(each.seen for each in parts), all(each.whole for each in parts)
        for part in parts:
            for batch, keys in zip(part._batches, part._keys, strict=True):
                found._add(batch, keys)
        return found

    def __len__(self) -> int:
        return sum(map(len, self._keys))

    def take(self, batch: Batch) -> None:
        """Keep some rows of a batch: copies, which do not change with the loader's own memory."""
        keys = torch.rand(len(batch[0]), generator=self._generator, dtype=torch.float64)
        self.seen += len(keys)
        self._joined = False
        self._add(batch, keys)
        while self._bytes > self.limit and len(self) > 1:
            self._threshold = torch.cat(self._keys).median().item()
            before = list(zip(self._batches, self._keys, strict=True))
            self._batches, self._keys, self._bytes = [], [], 0
            for each in before:
                self._add(*each)

    def _add(self, batch: Batch, keys: Tensor) -> None:
        chosen = (keys > self._threshold).nonzero().flatten()
        if len(chosen):
            own = tuple(each.index_select(0, chosen.to(each.device)) for each in batch)
            self._batches.append(own)
            self._keys.append(keys[chosen])
            self._bytes += sum(each.numel() * each.element_size() for each in tree_leaves(own))

    def joined(self) -> Batch | None:
        """The rows as one batch, None where their shapes differ between batches.

        They are in the order in which they came; those of a loader that shuffles in one that depends on the rows alone.
        A resumed fit keeps them in another pass, and yet in the same order.
        """
        if self._batches and not self._joined:
            shapes = [[each.shape[1:] for each in tree_leaves(batch)] for batch in self._batches]
            if any(each != shapes[0] for each in shapes):
                return None
            whole = tuple(torch.cat(each) for each in zip(*self._batches, strict=True))
            keys = torch.cat(self._keys)
            if self._shuffled:
                order = row_hashes(*whole[:2]).argsort()
                whole, keys = tuple(each.index_select(0, order.to(each.device)) for each in whole), keys[order]
            self._batches, self._keys, self._joined = [whole], [keys], True
        return self._batches[0] if self._batches else None

    @property
    def batches(self) -> list[Batch]:
        """The rows as they came, those of a batch together."""
        return self._batches


def pair_of(batch: Any, target: TargetName = None, name: str = "Each batch of the data") -> tuple[Any, Any]:
    """Inputs and targets of a batch: a pair, or a dict of which ``target`` is the target."""
    if isinstance(batch, Mapping):
        keys = ", ".join(map(repr, batch))
        if target is None:
            raise InvalidData(f"{name} is a dict with {keys}: say which is the target, kn.Data(..., target=...).")
        names = [target] if isinstance(target, str) else list(target)
        if not all(each in batch for each in names):
            raise InvalidData(f"target={target!r} is not there: {name[0].lower()}{name[1:]} has {keys}.")
        found = batch[target] if isinstance(target, str) else {each: batch[each] for each in names}
        return {key: each for key, each in batch.items() if key not in names}, found
    if target is not None:
        raise InvalidData(f"target={target!r} is for batches that are dicts, got {type(batch).__name__}.")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        got = f"{len(batch)} items" if isinstance(batch, tuple | list) else type(batch).__name__
        hint = SEVERAL if isinstance(batch, tuple | list) and len(batch) > 2 else ""
        raise InvalidData(f"Each batch of the data must be a pair (x, y), got {got}.{hint}")
    return tupled(batch[0]), batch[1]


def length_of(source: Any) -> int | None:
    """Number of batches, where it is known."""
    try:
        return len(source)
    except TypeError:
        return None


def _first_rows(batches: Iterator[Batch], most: int) -> Iterator[Batch]:
    """Batches of ``most`` rows in all; the last is cut to that, and no further one is asked for."""
    left = most
    for batch in batches:
        rows = len(batch[0])
        yield batch if rows <= left else tuple(each[:left] for each in batch)
        left -= rows
        if left <= 0:
            return


def in_order(loader: Any) -> Any:
    """The same loader without shuffling and without dropping the last batch, where its rows can be told apart."""
    if isinstance(loader, RowSource):
        return loader.in_order()
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    rows = sorted(sampler_of(loader))
    return DataLoader(loader.dataset, loader.batch_size or CHUNK, sampler=rows, collate_fn=loader.collate_fn)


def shuffles(loader: Any) -> bool:
    """Whether the rows come in another order in each epoch, as far as that can be told."""
    if isinstance(loader, RowSource):
        return True
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return not isinstance(sampler_of(loader), SequentialSampler)


def sampler_of(loader: DataLoader) -> Any:
    """The sampler of a loader, or that of its batch sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    return loader.batch_sampler.sampler if isinstance(loader.batch_sampler, BatchSampler) else loader.sampler
