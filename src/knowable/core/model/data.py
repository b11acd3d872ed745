"""The user's data as checked tensors, or as a loader whose size is known.

In-memory data is batched by index: one permutation an epoch and one ``index_select`` a batch, without a DataLoader's
overhead. The order of an epoch depends only on the seed and the epoch's number, so that a resumed fit sees the same
batches.

Rows may have weights, their own or those of their classes. A batch is then ``(x, y, weights)`` and not ``(x, y)``: code
that does not support weights fails to unpack it instead of silently ignoring them.

Inputs may be one tensor or several, see :mod:`knowable.core.network.inputs`.

A loader is read once an epoch and not more, see :mod:`knowable.core.model.stream`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from knowable.core.model.checking import cast_inputs, checked_pair, targets_of
from knowable.core.model.parquet import open_files
from knowable.core.model.row_source import OwnRows
from knowable.core.model.row_weights import checked_class_weights, checked_weights, weights_of_classes
from knowable.core.model.sources import is_dataset, size_found, size_of_loader, two_of
from knowable.core.model.stream import (
    CHUNK,
    Batch,
    Stream,
    TargetName,
    TargetShape,
    in_order,
    length_of,
    pair_of,
    shape_of,
)
from knowable.core.network.inputs import as_rows, check_arguments, check_inputs, is_several, tupled
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.errors import InvalidArgument, InvalidData, InvalidType

if TYPE_CHECKING:
    from knowable.core.model.model import Model

_FEWEST, _CHUNK_BYTES = 128, 16 * 2**20  # rows per batch where no gradient is needed, and their size
_PARTS, _PART_ROWS = 16, 64  # of an estimate on some of the rows: how many parts, and the rows of each, at least
FEWEST_ROWS = _PARTS * _PART_ROWS


@dataclass(frozen=True)
class Data:
    """A data set of known size N, with weights of its rows or classes if they have any.

    ``Data((x, y), weights=w)`` counts each row as often as its weight says, ``Data((x, y), class_weights="balanced")``
    each class as much as the others; ``Data(loader, size=10_000)`` gives a loader without a length its size: an epoch
    is so many rows of it, and it may be endless; ``Data(loader, target="labels")`` says which entry of batches that are
    dicts is the target.

    Attributes:
        source: ``(x, y)`` tensors or arrays in memory, a Dataset or a DataLoader. x is a tensor, a tuple of several
            (the network's arguments in order), a dict (its arguments by name) or a nested mix; all have the rows first.
        size: Number of examples N; None where it can be found by itself.
        weights: How much each row counts, ``(N,)``: the log likelihood is Σ w_n log p(y_n | x_n, θ), and a row of
            weight 2 counts as two rows. Only for data in memory. Where several networks are trained side by side, each
            may have its own: ``(N, members)``.
        class_weights: How much the rows of each class count: a number for each class, as in
            ``torch.nn.CrossEntropyLoss(weight=...)``, or ``"balanced"``: N / (classes x rows of the class), which sums
            up to N. A factor on ``weights`` where both are given. The numbers count as they are, and not as shares of
            their sum: twice as large, and the posterior is as sure as with twice the rows.
        target_shape: Shape of one target as the user gave it, ``()`` or ``(1,)``, by name where there are several; None
            where it is not known.
        at_once: Most rows that go through a network together, also where no gradient is needed: the batch size of the
            fit. None: as many as take 16 MB, at least 128 and at most 4,096. A loader keeps its own batches.
        target: Where rows or batches are dicts: the name of the target, or a list of several, which are then a dict of
            targets. All other entries are inputs.

    >>> Data((torch.zeros(4, 2), torch.tensor([0, 0, 0, 1])), class_weights="balanced").size
    4
    """

    source: Any
    size: int = None  # type: ignore[assignment]
    weights: Tensor | None = None
    target_shape: TargetShape = None
    class_weights: Any = None
    target: str | Sequence[str] | None = None
    at_once: int | None = None
    _stream: Stream = field(init=False, repr=False, compare=False)  # of a loader: its passes, and what is kept

    def __post_init__(self) -> None:
        source = self.source
        if isinstance(source, Mapping):
            source = pair_of(source, self.target, "data")
        ours = self.target is None and is_dataset(source)
        if isinstance(source, TensorDataset | tuple) or ours:  # a list is one of batches
            x, y = two_of(source, "data")
            source = as_rows(x) if is_several(x) else x, as_rows(y, "y") if isinstance(y, Mapping) else y
            object.__setattr__(self, "source", source)
        if self.size is None:
            object.__setattr__(self, "size", size_found(source))
        object.__setattr__(self, "size", check_count("size", self.size))
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights, self.size, self.in_memory))
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", checked_class_weights(self.class_weights, self.in_memory))
        if not self.in_memory:
            stream = source if isinstance(source, Stream) else Stream(source, self.size, target=self.target)
            object.__setattr__(self, "_stream", stream)

    @classmethod
    def parquet(
        cls,
        paths: Any,
        *,
        target: str | Sequence[str],
        features: Sequence[str] | None = None,
        batch_size: int = 1024,
        shuffle: bool = True,
    ) -> Data:
        """The rows of Parquet or Arrow files, which may be larger than memory.

        Row groups are read as they are needed. An epoch takes them in random order, keeps the rows of 32 MB of them,
        and gives batches of these in random order; both orders follow from the seed of the fit and the epoch.

        Args:
            paths: Name of a file or a folder, or several: Parquet (``.parquet``, ``.pq``) or Arrow IPC (``.arrow``,
                ``.feather``, ``.ipc``).
            target: The column to predict, or several. Whole numbers are classes or counts.
            features: The columns that the network sees, in order; None takes all others. All must be numbers without
                missing values.
            batch_size: Rows of a batch.
            shuffle: Whether an epoch comes in random order.

        Raises:
            MissingExtra: Without pyarrow.
            InvalidData: If a file cannot be read, or a column is not there or not of numbers; while it is read, if
                values are missing. Errors name the file, the column and the row group.
        """
        files = open_files(paths, target=target, features=features, batch_size=batch_size, shuffle=shuffle)
        return cls(files, files.size)

    @property
    def weighted(self) -> bool:
        """Whether rows or classes have weights."""
        return self.weights is not None or self.class_weights is not None

    @property
    def in_memory(self) -> bool:
        """Whether all rows are held as two tensors."""
        return isinstance(self.source, tuple)

    @property
    def divided(self) -> bool:
        """Whether each of several processes has rows that no other has."""
        return not self.in_memory and self._stream.processes.several

    @property
    def own_tensors(self) -> Batch:
        """The rows of this process, all at once."""
        whole = self if self.in_memory else self._stream.own_whole()
        return self.tensors if self.in_memory else tuple(torch.cat(each) for each in zip(*whole, strict=True))

    @property
    def tensors(self) -> Batch:
        """All rows at once, with their weights if they have any; a loader is read through."""
        if self.in_memory:
            return self.source if self.weights is None else (*self.source, self.weights)
        return tuple(torch.cat(each) for each in zip(*self, strict=True))

    def batches(self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0) -> Iterator[Batch]:
        """One epoch of shuffled batches, from batch number ``skip`` on. A loader keeps its own batches and order.

        Where rows are divided among processes, these are the batches of this one.
        """
        if not self.in_memory:
            self._set_steps(batch_size)
            for number, batch in enumerate(self._stream.epoch(seed, goes_on=epoch == skip == 0)):
                if number >= skip:
                    yield batch
            return
        whole = self.tensors
        sizes = _batch_sizes(self.size, batch_size)
        if len(sizes) == 1:
            if skip == 0:
                yield whole
            return
        order = torch.randperm(self.size, generator=generator_for(seed, epoch))
        for rows in order.to(whole[0].device).split(sizes)[skip:]:
            yield tuple(each.index_select(0, rows) for each in whole)

    @property
    def most_rows(self) -> int:
        """How many rows in memory go through a network together."""
        if self.at_once is not None or not self.in_memory:
            return self.at_once or CHUNK
        row = sum(each[0].numel() * each.element_size() for each in tree_leaves(self.source) if len(each))
        return min(CHUNK, max(_FEWEST, _CHUNK_BYTES // max(1, row)))

    def batches_per_epoch(self, batch_size: int) -> int:
        """How many batches one epoch has; of an iterable without a length, if all have as many rows as the first."""
        if self.in_memory:
            return len(_batch_sizes(self.size, batch_size))
        self._set_steps(batch_size)
        count = length_of(self.source)
        count = -(-self._stream.size // self._stream.rows_of_batches) if count is None else count
        return max(self._stream.processes.gather(count))

    def _set_steps(self, batch_size: int) -> None:
        """Divide rows that are a process's own into as many batches as the other processes make of theirs."""
        if isinstance(self._stream.loader, OwnRows):
            self._stream.loader.steps = -(-self.size // batch_size)

    @property
    def shape_of_target(self) -> TargetShape:
        """``target_shape``; of a loader, that of the batches it has given."""
        return self.target_shape if self.in_memory else self._stream.target_shape

    @property
    def first(self) -> Batch:
        """The first rows. The next epoch of a loader begins with this batch and does not read it again."""
        return next(iter(self)) if self.in_memory else self._stream.first

    @property
    def kept(self) -> Data | None:
        """Rows in memory: all, or those kept of the first pass through a loader; None where their shapes differ."""
        if self.in_memory:
            return self
        found = self._stream.kept().joined()
        if found is None:
            return None
        x, y, *weights = found
        return Data((x, y), len(x), weights[0] if weights else None, at_once=len(self.first[0]))

    def keep_at_most(self, size: int) -> None:
        """Keep only so many bytes of a loader's rows, for a fit that needs no more of them than their hashes."""
        if not self.in_memory:
            self._stream.limit = min(self._stream.limit, size)

    @property
    def held(self) -> Data | None:
        """All rows, if they are in memory: their own, or those of a loader that is small enough for all to be kept."""
        kept = self.kept
        return None if kept is None or kept.size < self.size else kept

    @property
    def sample_notes(self) -> tuple[str, ...]:
        """A note if what is said of all rows is an estimate from those kept of a loader."""
        if self.in_memory or len(self._stream.kept()) >= self.size:
            return ()
        return (
            f"The loader was not read again for the final estimates: they are from {len(self._stream.kept()):,} of "
            f"{self.size:,} rows, a random sample kept while training read them.",
        )

    def some(self, most: int, *, seed: int) -> Batch:
        """At most so many rows, drawn without replacement; of a loader that was not yet read, its first ones."""
        if self.in_memory:
            whole = self.tensors
            chosen = torch.randperm(self.size, generator=generator_for(seed, "statistics"))[:most].to(whole[0].device)
            return tuple(each[chosen] for each in whole)
        if self._stream.was_read or self.divided:
            kept = self.kept
            if kept is not None:
                return kept.some(most, seed=seed)
        found, count = [], 0
        with own_randomness(derive_seed(seed, "statistics")):  # a loader may shuffle
            for batch in self.batches(most, seed=seed):
                found.append(batch)
                count += len(batch[0])
                if count >= most:
                    break
        return tuple(torch.cat(each)[:most] for each in zip(*found, strict=True))

    def some_batches(self, batch_size: int, most: int, *, seed: int) -> list[Batch]:
        """At most so many batches of an epoch; of a loader, of its size and from the rows kept."""
        kept = None if self.in_memory else self.kept
        if kept is None:
            return list(islice(self.batches(batch_size, seed=seed), most))
        batches = list(kept)  # its own ones, where all rows were kept of a loader that does not shuffle
        chosen = torch.randperm(len(batches), generator=generator_for(seed, "batches"))[:most]
        return [batches[number] for number in sorted(chosen.tolist())]

    def parts(self, passes: float, *, seed: int, fewest: int = _PARTS) -> Iterator[tuple[float, Batch]]:
        """Random parts of the rows, each with the factor N / (its rows) by which it stands for all of them.

        There are at least ``fewest``. Together they have about ``passes`` times as many rows as the data, more where
        that would make parts of less than 64 rows. Of a loader that is larger than what is kept of it, they are equal
        parts of the rows kept, of which none is in two parts: their spread then is that of all rows.
        """
        rows = self.held
        if rows is None:
            yield from self._parts_of_sample(passes, seed, fewest)
            return
        whole = rows.tensors
        count = int(min(rows.most_rows, max(passes * self.size / _PARTS, _PART_ROWS)))
        for number in range(max(fewest, round(passes * self.size / count))):
            if count >= self.size:
                yield 1.0, whole
                continue
            chosen = torch.randint(self.size, (count,), generator=generator_for(seed, "part", number))
            yield self.size / count, tuple(each.index_select(0, chosen.to(each.device)) for each in whole)

    def _parts_of_sample(self, passes: float, seed: int, fewest: int) -> Iterator[tuple[float, Batch]]:
        kept = self.kept
        if kept is None:
            yield from ((self.size / len(batch[0]), batch) for batch in self._stream.kept().batches)
            return
        wanted = min(kept.size, math.ceil(max(passes * self.size, fewest * _PART_ROWS)))
        number = min(wanted, max(fewest, -(-wanted // kept.most_rows)))
        rows = wanted // number
        order = torch.randperm(kept.size, generator=generator_for(seed, "part"))[: number * rows]
        for chosen in order.split(rows):
            yield self.size / rows, tuple(each.index_select(0, chosen.to(each.device)) for each in kept.tensors)

    def __iter__(self) -> Iterator[Batch]:
        """All rows once, in order, in large batches."""
        if not self.in_memory:
            yield from self._stream.whole()
            return
        yield from zip(*(each.split(self.most_rows) for each in self.tensors), strict=True)

    def __repr__(self) -> str:
        weighted = ", weighted" if self.weighted else ""
        if not self.in_memory:
            return f"Data({type(self.source).__name__}, size={self.size:,}{weighted})"
        x, y = self.source
        shape = tuple(x.shape) if isinstance(x, Tensor) else x
        return f"Data(x={shape}, y={tuple(y.shape)}{weighted})"


def as_data(data: Any, model: Model | None = None, *, name: str = "data", batch_size: int | None = None) -> Data:
    """Accept ``(x, y)``, a Dataset (torch's or one of ours), a DataLoader or Data; check it against the model once.

    Args:
        data: What the user passed.
        model: The model that will see it: fixes dtype and device, and checks labels and shapes.
        name: What error messages call it.
        batch_size: Most rows of data in memory that go through a network together, and the batch size for a Dataset
            that has to be loaded row by row.
    """
    if isinstance(data, Data):
        if not data.in_memory:
            source = data.source
            if isinstance(source, Dataset):
                source = DataLoader(source, batch_size=batch_size or 128, shuffle=True)
            return _loaded(source, data.size, model, name, data.class_weights, data.target)
        inner = as_data(data.source, model, name=name, batch_size=batch_size)
        if inner.size != data.size:
            raise InvalidArgument(f"{name}.size is {data.size}, but its tensors have {inner.size} rows.")
        if model is None:
            return replace(inner, weights=data.weights, class_weights=data.class_weights)
        weights = None if data.weights is None else data.weights.to(device=model.device, dtype=model.dtype)
        if data.class_weights is not None:
            by_class = weights_of_classes(data.class_weights, inner.source[1], model)
            weights = by_class if weights is None else weights * by_class.view(-1, *(1,) * (weights.dim() - 1))
        return replace(inner, weights=weights)
    if isinstance(data, TensorDataset):
        data = two_of(data, name)
    if isinstance(data, DataLoader):
        return _loaded(data, size_of_loader(data, name), model, name)
    if isinstance(data, IterableDataset):
        raise InvalidArgument(
            f"{name} is an IterableDataset, whose number of rows is unknown, and the posterior "
            f"depends on it. Pass Data(DataLoader(...), size=N)."
        )
    if isinstance(data, Dataset):
        if len(data) == 0:  # type: ignore[arg-type]
            raise InvalidData(f"{name} is empty: it has no rows.")
        loader = DataLoader(data, batch_size=batch_size or 128, shuffle=True)
        return _loaded(loader, len(data), model, name)  # type: ignore[arg-type]
    data = two_of(data, name)
    x, y = checked_pair(data[0], data[1], model, name)
    counted = None if model is None else model.likelihood.counted(y)
    if model is not None and counted is not None and not counted.any():
        raise InvalidData(f"No target of {name} counts: all are missing or ignored ({model.likelihood!r}).")
    return Data((x, y), x.shape[0], target_shape=shape_of(targets_of(data[1], model)), at_once=batch_size)


def as_input(x: Any, model: Model, *, name: str = "x") -> Tensor:
    """Check inputs alone, as for a prediction; of a Dataset or a loader, all of its inputs in their order."""
    x = column_of(x, 0)
    pair = isinstance(x, tuple | list) and len(x) == 2 and all(getattr(each, "ndim", 0) for each in x)
    if pair and not _fits_arguments(x, model):
        raise InvalidType(f"{name} must be the inputs alone, got a pair. Pass the x of (x, y).")
    x = cast_inputs(check_inputs(as_rows(x, name), name), model)
    model.probe(x)
    return x


def _fits_arguments(x: Any, model: Model) -> bool:
    """Whether two arrays can be rows, or inputs of the network."""
    if isinstance(x, list):
        return x[0].shape == x[1].shape
    try:
        check_arguments(model.net, as_rows(x))
    except InvalidData:
        return False
    return True


def column_of(data: Any, place: int) -> Any:
    """Inputs (place 0) or targets (1) of a Dataset, a loader or Data, all rows in the order of the data set.

    A loader's shuffling and ``drop_last`` do not count. Anything else is returned as it is.
    """
    target = None
    if isinstance(data, Data):
        if not data.in_memory and length_of(data.source) is None:
            return torch.cat([as_rows(batch[place], "xy"[place]) for batch in data])
        data, target = data.source, data.target
        if isinstance(data, tuple):
            return data[place]
    if isinstance(data, TensorDataset):
        return data.tensors[place] if place < len(data.tensors) else _notargets_of(place)
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=CHUNK)
    if is_dataset(data):
        return (data.x, data.y)[place]
    if not isinstance(data, DataLoader | Stream):
        return data
    found = []
    for batch in data.whole() if isinstance(data, Stream) else in_order(data):
        parts = pair_of(batch, target) if target else batch if isinstance(batch, tuple | list) else (batch,)
        found.append(as_rows(tupled(parts[place]) if place < len(parts) else _notargets_of(place), "xy"[place]))
    if not found:
        raise InvalidData("The loader gave no batch: its dataset is empty, or it can be read only once.")
    return torch.cat(found)


def _batch_sizes(size: int, batch_size: int) -> list[int]:
    """Equal batches and a remainder; a remainder of one row joins the batch before it (batch statistics need two)."""
    full, rest = divmod(size, batch_size)
    sizes = [batch_size] * full
    if rest == 1 and full:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


def _loaded(
    loader: Any, size: int, model: Model | None, name: str, class_weights: Any = None, target: TargetName = None
) -> Data:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and len(loader) == 0:
        raise InvalidData(
            f"{name} is a loader without a single batch: its batch_size is larger than the dataset and drop_last=True."
        )
    if model is not None and not isinstance(loader, Stream):
        loader = Stream(loader, size, model, name, class_weights, target)
    return Data(loader, size, class_weights=class_weights, target=target)


def _notargets_of(place: int) -> Any:
    raise InvalidData(f"The batches have no {'xy'[place]}: each must be a pair (x, y).")
