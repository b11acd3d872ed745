"""The user's data as checked tensors, or as a loader whose size is known.

In-memory data is batched by index: one permutation an epoch and one ``index_select`` a batch, without a DataLoader's
overhead. The order of an epoch depends only on the seed and the epoch's number, so that a resumed fit sees the same
batches.

Rows may have weights. A batch is then ``(x, y, weights)`` and not ``(x, y)``: code that does not support weights fails
to unpack it instead of silently ignoring them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.support.tensors import check_finite, check_rows, to_tensor
from knowable.errors import InvalidArgument, InvalidData, InvalidType

if TYPE_CHECKING:
    from knowable.core.model.model import Model

Batch = tuple[Tensor, ...]
"""``(x, y)``, or ``(x, y, weights)`` where rows have weights."""

_CHUNK = 4096  # rows per batch where no gradient is needed


@dataclass(frozen=True)
class Data:
    """A data set of known size N.

    Wrap a loader that has no length: ``Data(loader, size=10_000)``. Wrap tensors to give rows weights:
    ``Data((x, y), size=len(x), weights=w)``.

    Attributes:
        source: ``(x, y)`` tensors in memory, or a DataLoader.
        size: Number of examples N.
        weights: How much each row counts, ``(N,)``: the log likelihood is Σ w_n log p(y_n | x_n, θ), and a row of
            weight 2 counts as two rows. Only for data in memory. Where several networks are trained side by side, each
            may have its own: ``(N, members)``.
        target_shape: Shape of one target as the user gave it, ``()`` or ``(1,)``; None where it is not known.
    """

    source: Any
    size: int
    weights: Tensor | None = None
    target_shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", check_count("size", self.size))
        if self.weights is not None:
            object.__setattr__(self, "weights", _checked_weights(self.weights, self.size, self.in_memory))

    @property
    def in_memory(self) -> bool:
        """Whether all rows are held as two tensors."""
        return isinstance(self.source, tuple)

    @property
    def tensors(self) -> Batch:
        """All rows at once, with their weights if they have any; a loader is read through."""
        if self.in_memory:
            return self.source if self.weights is None else (*self.source, self.weights)
        batches = list(self)
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def batches(self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0) -> Iterator[Batch]:
        """One epoch of shuffled batches, from batch number ``skip`` on. A loader keeps its own batches and order."""
        if not self.in_memory:
            for number, batch in enumerate(self.source):
                if number >= skip:
                    yield _pair(batch)
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

    def batches_per_epoch(self, batch_size: int) -> int:
        """How many batches one epoch has."""
        if self.in_memory:
            return len(_batch_sizes(self.size, batch_size))
        try:
            return len(self.source)
        except TypeError:  # an iterable without a length
            return sum(1 for _ in self.source)

    def some(self, most: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """At most so many rows, drawn without replacement from data in memory, the first ones that a loader gives."""
        if self.in_memory:
            x, y = self.source
            chosen = torch.randperm(len(x), generator=generator_for(seed, "statistics"))[:most].to(x.device)
            return x[chosen], y[chosen]
        found, count = [], 0
        with own_randomness(derive_seed(seed, "statistics")):  # a loader may shuffle
            for batch in self.batches(most):
                found.append(batch[:2])
                count += len(batch[0])
                if count >= most:
                    break
        x, y = (torch.cat(each)[:most] for each in zip(*found, strict=True))
        return x, y

    def __iter__(self) -> Iterator[Batch]:
        """All rows once, in order, in large batches."""
        if not self.in_memory:
            whole = self.source.whole() if isinstance(self.source, _Checked) else self.source
            yield from map(_pair, whole)
            return
        yield from zip(*(each.split(_CHUNK) for each in self.tensors), strict=True)

    def __repr__(self) -> str:
        if not self.in_memory:
            return f"Data({type(self.source).__name__}, size={self.size:,})"
        weighted = "" if self.weights is None else ", weighted"
        return f"Data(x={tuple(self.source[0].shape)}, y={tuple(self.source[1].shape)}{weighted})"


class _Checked:
    """A loader whose batches are cast and checked for the model as they come."""

    def __init__(self, loader: Any, model: Model, name: str):
        self.loader, self.model, self.name = loader, model, name

    def __iter__(self) -> Iterator[Batch]:
        return self._checked(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def whole(self) -> Iterator[Batch]:
        """Every row once, in order: without shuffling and without dropping the last batch."""
        loader = self.loader
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            rows = sorted(_sampler_of(loader))
            loader = DataLoader(loader.dataset, loader.batch_size or _CHUNK, sampler=rows, collate_fn=loader.collate_fn)
        return self._checked(loader)

    def _checked(self, loader: Any) -> Iterator[Batch]:
        for batch in loader:
            yield checked_pair(*_pair(batch), self.model, self.name)


def as_data(data: Any, model: Model | None = None, *, name: str = "data", batch_size: int | None = None) -> Data:
    """Accept ``(x, y)``, a Dataset (torch's or one of ours), a DataLoader or Data; check it against the model once.

    Args:
        data: What the user passed.
        model: The model that will see it: fixes dtype and device, and checks labels and shapes.
        name: What error messages call it.
        batch_size: Batch size for a Dataset that has to be loaded row by row.
    """
    if isinstance(data, Data):
        if not data.in_memory:
            return _loaded(data.source, data.size, model, name)
        inner = as_data(data.source, model, name=name, batch_size=batch_size)
        if inner.size != data.size:
            raise InvalidArgument(f"{name}.size is {data.size}, but its tensors have {inner.size} rows.")
        if data.weights is None or model is None:
            return replace(inner, weights=data.weights)
        return replace(inner, weights=data.weights.to(device=model.device, dtype=model.dtype))
    if isinstance(data, TensorDataset):
        data = data.tensors
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
    if isinstance(getattr(data, "x", None), Tensor) and isinstance(getattr(data, "y", None), Tensor):
        data = data.x, data.y  # one of knowable.datasets
    if not isinstance(data, tuple | list) or len(data) != 2:
        got = f"{len(data)} items" if isinstance(data, tuple | list) else type(data).__name__
        raise InvalidType(f"{name} must be a pair (x, y), a Dataset or a DataLoader; got {got}.")
    x, y = checked_pair(data[0], data[1], model, name)
    return Data((x, y), x.shape[0], target_shape=tuple(to_tensor(data[1], "y").shape[1:]))


def as_input(x: Any, model: Model, *, name: str = "x") -> Tensor:
    """Check inputs alone, as for a prediction."""
    return _cast(check_finite(check_rows(to_tensor(x, name), name), name), model)


def _batch_sizes(size: int, batch_size: int) -> list[int]:
    """Equal batches and a remainder; a remainder of one row joins the batch before it (batch statistics need two)."""
    full, rest = divmod(size, batch_size)
    sizes = [batch_size] * full
    if rest == 1 and full:
        sizes[-1] += 1
    elif rest:
        sizes.append(rest)
    return sizes


def _loaded(loader: Any, size: int, model: Model | None, name: str) -> Data:
    if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) and len(loader) == 0:
        raise InvalidData(
            f"{name} is a loader without a single batch: its batch_size is larger than the dataset and drop_last=True."
        )
    return Data(loader if isinstance(loader, _Checked) or model is None else _Checked(loader, model, name), size)


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


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InvalidData(f"Each batch of the data must be a pair (x, y), got {type(batch).__name__}.")
    return batch[0], batch[1]


def checked_pair(x: Any, y: Any, model: Model | None, name: str = "data") -> tuple[Tensor, Tensor]:
    """Inputs and targets as ``model`` takes them, or an error that says what is wrong with which."""
    of = "" if name == "data" else f" of {name}"
    x, y = to_tensor(x, f"x{of}"), to_tensor(y, f"y{of}")
    check_rows(x, f"x{of}")
    if y.dim() == 0 or x.shape[0] != y.shape[0]:
        raise InvalidData(
            f"x and y must have the same number of rows, got x {tuple(x.shape)} and y {tuple(y.shape)} in {name}."
        )
    check_finite(x, f"x{of}")
    if model is None:
        return x, y
    x = _cast(x, model)
    output = model.network.probe(x, model.network_params(model.params()), model.buffers())
    return x, model.likelihood.check_target(y.to(model.device), output, name=f"y{of}")


def _cast(x: Tensor, model: Model) -> Tensor:
    """Cast to the model's dtype. Integer inputs are kept if the network accepts them (embeddings)."""
    x = x.to(model.device)
    if not x.is_floating_point():
        try:
            model.network.probe(x, model.network_params(model.params()), model.buffers())
            return x
        except InvalidData:
            pass
    return x.to(model.dtype)


def _checked_weights(weights: Any, size: int, in_memory: bool) -> Tensor:
    if not in_memory:
        raise InvalidArgument("weights go with rows in memory: pass Data((x, y), size=len(x), weights=weights).")
    weights = to_tensor(weights, "weights")
    if weights.dim() not in (1, 2) or weights.shape[0] != size:
        raise InvalidArgument(f"weights must have a number for each of {size} rows, got shape {tuple(weights.shape)}.")
    check_finite(weights, "weights")
    if (weights < 0).any() or not (weights.sum(0) > 0).all():
        raise InvalidArgument("weights must be 0 or above and not all 0.")
    return weights
