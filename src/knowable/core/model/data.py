"""The user's data as checked tensors, or as a loader whose size is known.

In-memory data is batched by index: one permutation an epoch and one ``index_select`` a batch, without a DataLoader's
overhead. The order of an epoch depends only on the seed and the epoch's number, so that a resumed fit sees the same
batches.

Rows may have weights, their own or those of their classes. A batch is then ``(x, y, weights)`` and not ``(x, y)``: code
that does not support weights fails to unpack it instead of silently ignoring them.

Inputs may be one tensor or several, see :mod:`knowable.core.network.inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from knowable.core.model.checking import cast_inputs, checked_pair, targets_of
from knowable.core.model.row_weights import checked_class_weights, checked_weights, weights_of_classes
from knowable.core.network.inputs import as_rows, check_arguments, check_inputs, is_several, tupled
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.errors import InvalidArgument, InvalidData, InvalidType

if TYPE_CHECKING:
    from knowable.core.model.model import Model

Batch = tuple[Tensor, ...]
"""``(x, y)``, or ``(x, y, weights)`` where rows have weights."""

TargetShape = tuple[int, ...] | dict[str, tuple[int, ...]] | None
"""Shape of one target as the user gave it, by name where there are several; None where it is not known."""

_Target = str | Sequence[str] | None
_CHUNK, _FEWEST, _CHUNK_BYTES = 4096, 128, 16 * 2**20  # rows per batch where no gradient is needed, and their size
_SEVERAL = " Several inputs go in a tuple or a dict: ((a, b), y)."
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

    def __post_init__(self) -> None:
        source = self.source
        if isinstance(source, Mapping):
            source = _pair(source, self.target, "data")
        ours = self.target is None and _is_ours(source)
        if isinstance(source, TensorDataset | tuple) or ours:  # a list is one of batches
            x, y = _two(source, "data")
            source = as_rows(x) if is_several(x) else x, as_rows(y, "y") if isinstance(y, Mapping) else y
            object.__setattr__(self, "source", source)
        if self.size is None:
            object.__setattr__(self, "size", _size_found(source))
        object.__setattr__(self, "size", check_count("size", self.size))
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights, self.size, self.in_memory))
        if self.class_weights is not None:
            object.__setattr__(self, "class_weights", checked_class_weights(self.class_weights, self.in_memory))

    @property
    def weighted(self) -> bool:
        """Whether rows or classes have weights."""
        return self.weights is not None or self.class_weights is not None

    @property
    def in_memory(self) -> bool:
        """Whether all rows are held as two tensors."""
        return isinstance(self.source, tuple)

    @property
    def tensors(self) -> Batch:
        """All rows at once, with their weights if they have any; a loader is read through."""
        if self.in_memory:
            return self.source if self.weights is None else (*self.source, self.weights)
        return tuple(torch.cat(each) for each in zip(*self, strict=True))

    def batches(self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0) -> Iterator[Batch]:
        """One epoch of shuffled batches, from batch number ``skip`` on. A loader keeps its own batches and order."""
        if not self.in_memory:
            for number, batch in enumerate(self._epoch(self.source)):
                if number >= skip:
                    yield batch if isinstance(self.source, _Checked) else _pair(batch, self.target)
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
            return self.at_once or _CHUNK
        row = sum(each[0].numel() * each.element_size() for each in tree_leaves(self.source) if len(each))
        return min(_CHUNK, max(_FEWEST, _CHUNK_BYTES // max(1, row)))

    def batches_per_epoch(self, batch_size: int) -> int:
        """How many batches one epoch has; of an iterable without a length, if all have as many rows as the first."""
        if self.in_memory:
            return len(_batch_sizes(self.size, batch_size))
        count = _length(self.source)
        return -(-self.size // _rows_of_batches(self.source)) if count is None else count

    def _epoch(self, batches: Any) -> Any:
        """One epoch of a loader's batches: all of them, or N rows where it has no length (and perhaps no end)."""
        return batches if _length(self.source) is not None else _first_rows(batches, self.size)

    def some(self, most: int, *, seed: int) -> Batch:
        """At most so many rows, drawn without replacement from data in memory, the first ones that a loader gives."""
        if self.in_memory:
            whole = self.tensors
            chosen = torch.randperm(self.size, generator=generator_for(seed, "statistics"))[:most].to(whole[0].device)
            return tuple(each[chosen] for each in whole)
        found, count = [], 0
        with own_randomness(derive_seed(seed, "statistics")):  # a loader may shuffle
            for batch in self.batches(most):
                found.append(batch)
                count += len(batch[0])
                if count >= most:
                    break
        return tuple(torch.cat(each)[:most] for each in zip(*found, strict=True))

    def parts(self, passes: float, *, seed: int, fewest: int = _PARTS) -> Iterator[tuple[float, Batch]]:
        """Random parts of the rows, each with the factor N / (its rows) by which it stands for all of them.

        There are at least ``fewest``. Together they have about ``passes`` times as many rows as the data, more where
        that would make parts of less than 64 rows. Those of a loader are its own batches, in its own order.
        """
        if self.in_memory:
            whole = self.tensors
            rows = int(min(self.most_rows, max(passes * self.size / _PARTS, _PART_ROWS)))
            for number in range(max(fewest, round(passes * self.size / rows))):
                if rows >= self.size:
                    yield 1.0, whole
                    continue
                chosen = torch.randint(self.size, (rows,), generator=generator_for(seed, "part", number))
                yield self.size / rows, tuple(each.index_select(0, chosen.to(each.device)) for each in whole)
            return
        done, rows = 0, 0
        while done < fewest or rows < passes * self.size:
            for batch in self.batches(_CHUNK):
                done, rows = done + 1, rows + len(batch[0])
                yield self.size / len(batch[0]), batch
                if done >= fewest and rows >= passes * self.size:
                    break

    def __iter__(self) -> Iterator[Batch]:
        """All rows once, in order, in large batches."""
        if not self.in_memory:
            checked = isinstance(self.source, _Checked)
            yield from self._epoch(
                self.source.whole() if checked else (_pair(each, self.target) for each in self.source)
            )
            return
        yield from zip(*(each.split(self.most_rows) for each in self.tensors), strict=True)

    def __repr__(self) -> str:
        weighted = ", weighted" if self.weighted else ""
        if not self.in_memory:
            return f"Data({type(self.source).__name__}, size={self.size:,}{weighted})"
        x, y = self.source
        shape = tuple(x.shape) if isinstance(x, Tensor) else x
        return f"Data(x={shape}, y={tuple(y.shape)}{weighted})"


class _Checked:
    """A loader whose batches are cast and checked for the model as they come."""

    def __init__(
        self, loader: Any, model: Model, name: str, class_weights: Tensor | None = None, target: _Target = None
    ):
        self.loader, self.model, self.name, self.class_weights, self.target = loader, model, name, class_weights, target

    def __iter__(self) -> Iterator[Batch]:
        return self._checked(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def whole(self) -> Iterator[Batch]:
        """Every row once, in order: without shuffling and without dropping the last batch."""
        return self._checked(_in_order(self.loader))

    def _checked(self, loader: Any) -> Iterator[Batch]:
        for batch in loader:
            x, y = checked_pair(*_pair(batch, self.target), self.model, self.name)
            yield (
                (x, y) if self.class_weights is None else (x, y, weights_of_classes(self.class_weights, y, self.model))
            )


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
        data = _two(data, name)
    if isinstance(data, DataLoader):
        return _loaded(data, _size_of(data, name), model, name)
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
    data = _two(data, name)
    x, y = checked_pair(data[0], data[1], model, name)
    counted = None if model is None else model.likelihood.counted(y)
    if model is not None and counted is not None and not counted.any():
        raise InvalidData(f"No target of {name} counts: all are missing or ignored ({model.likelihood!r}).")
    return Data((x, y), x.shape[0], target_shape=_target_shape(targets_of(data[1], model)), at_once=batch_size)


def _target_shape(y: Tensor) -> TargetShape:
    """Shape of one target, by name where there are several."""
    if isinstance(y, Tensor):
        return tuple(y.shape[1:])
    return {name: tuple(each.shape[1:]) for name, each in y.tree.items()}


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
        if not data.in_memory and _length(data.source) is None:
            return torch.cat([as_rows(batch[place], "xy"[place]) for batch in data])
        data, target = data.source, data.target
        if isinstance(data, tuple):
            return data[place]
    if isinstance(data, TensorDataset):
        return data.tensors[place] if place < len(data.tensors) else _notargets_of(place)
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=_CHUNK)
    if _is_ours(data):
        return (data.x, data.y)[place]
    if not isinstance(data, DataLoader | _Checked):
        return data
    found = []
    for batch in data.whole() if isinstance(data, _Checked) else _in_order(data):
        parts = _pair(batch, target) if target else batch if isinstance(batch, tuple | list) else (batch,)
        found.append(as_rows(tupled(parts[place]) if place < len(parts) else _notargets_of(place), "xy"[place]))
    if not found:
        raise InvalidData("The loader gave no batch: its dataset is empty, or it can be read only once.")
    return torch.cat(found)


def _length(source: Any) -> int | None:
    """Number of batches, where it is known."""
    try:
        return len(source)
    except TypeError:
        return None


def _rows_of_batches(source: Any) -> int:
    """Number of rows of a batch: what the loader says, or those of the first."""
    loader = source.loader if isinstance(source, _Checked) else source
    if isinstance(loader, DataLoader) and loader.batch_size is not None:
        return loader.batch_size
    return max(1, next((_row_count(_pair(batch)[1]) for batch in loader), 1))


def _row_count(y: Any) -> int:
    """Number of rows of targets, one or several by name."""
    return len(next(iter(y.values()))) if isinstance(y, Mapping) else len(y)


def _first_rows(batches: Any, most: int) -> Iterator[Any]:
    """Batches of ``most`` rows in all; the last is cut to that, and no further one is asked for."""
    left = most
    for batch in batches:
        rows = _row_count(_pair(batch[:2] if isinstance(batch, tuple | list) else batch)[1])
        yield batch if rows <= left else tree_map_only(Tensor, itemgetter(slice(left)), tuple(batch))
        left -= rows
        if left <= 0:
            return


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
    loader: Any, size: int, model: Model | None, name: str, class_weights: Any = None, target: _Target = None
) -> Data:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and len(loader) == 0:
        raise InvalidData(
            f"{name} is a loader without a single batch: its batch_size is larger than the dataset and drop_last=True."
        )
    if model is not None and not isinstance(loader, _Checked):
        loader = _Checked(loader, model, name, class_weights, target)
    return Data(loader, size, class_weights=class_weights, target=target)


def _in_order(loader: Any) -> Any:
    """The same loader without shuffling and without dropping the last batch, where its rows can be told apart."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return loader
    rows = sorted(_sampler_of(loader))
    return DataLoader(loader.dataset, loader.batch_size or _CHUNK, sampler=rows, collate_fn=loader.collate_fn)


def _is_ours(data: Any) -> bool:
    """Whether it is one of knowable.datasets."""
    return isinstance(getattr(data, "x", None), Tensor) and isinstance(getattr(data, "y", None), Tensor)


def _two(data: Any, name: str) -> tuple[Any, Any]:
    """Inputs and targets of data in memory."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if _is_ours(data):
        return data.x, data.y
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    if isinstance(data, tuple | list):
        got = f"{len(data)} items"
        hint = _SEVERAL if len(data) > 2 else ""
        hint += " Weights of rows go beside them: kn.Data((x, y), weights=w)." if len(data) == 3 else ""
    else:
        got = f"{type(data).__name__}"
        hint = " Put inputs and targets in parentheses: (x, y)." if getattr(data, "ndim", 0) else ""
        if isinstance(data, Mapping):
            hint = " Say which of its entries is the target: kn.Data(..., target=...)."
    raise InvalidType(f"{name} must be a pair (x, y), a Dataset or a DataLoader; got {got}.{hint}")


def _size_found(source: Any) -> int:
    if isinstance(source, tuple):
        return len(as_rows(source[0], "x"))
    if isinstance(source, DataLoader):
        return _size_of(source, "data")
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return len(source)  # type: ignore[arg-type]
    raise InvalidArgument(
        f"size must be given: the number of rows of a {type(source).__name__} is not known, and the posterior depends "
        f"on it. Pass Data(loader, size=N)."
    )


def _size_of(loader: DataLoader, name: str) -> int:
    try:
        size = len(_sampler_of(loader))
    except TypeError:
        raise InvalidArgument(
            f"{name} is a loader whose number of rows is unknown, and the posterior depends on it. "
            f"Pass Data(loader, size=N)."
        ) from None
    if size == 0:
        raise InvalidData(f"{name} is empty: its dataset has no rows.")
    return size


def _sampler_of(loader: DataLoader) -> Any:
    """The sampler of a loader, or that of its batch sampler."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    return loader.batch_sampler.sampler if isinstance(loader.batch_sampler, BatchSampler) else loader.sampler


def _pair(batch: Any, target: _Target = None, name: str = "Each batch of the data") -> tuple[Any, Any]:
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
        hint = _SEVERAL if isinstance(batch, tuple | list) and len(batch) > 2 else ""
        raise InvalidData(f"Each batch of the data must be a pair (x, y), got {got}.{hint}")
    return tupled(batch[0]), batch[1]


def _notargets_of(place: int) -> Any:
    raise InvalidData(f"The batches have no {'xy'[place]}: each must be a pair (x, y).")
