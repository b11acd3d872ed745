"""Data at the door: whatever the user has becomes checked tensors, or a loader whose size is known.

In-memory data is batched by index: one permutation an epoch and one ``index_select`` a batch, without a DataLoader's
overhead. The order of an epoch depends only on the seed and the epoch's number, so that a resumed fit sees the same
batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from knowable.core.checks import check_count
from knowable.core.randomness import generator_for
from knowable.errors import InvalidArgument, InvalidData, InvalidType

if TYPE_CHECKING:
    from knowable.core.model import Model

Batch = tuple[Tensor, Tensor]
_CHUNK = 4096  # rows per batch where no gradient is needed


@dataclass(frozen=True)
class Data:
    """A data set of known size N.

    Wrap a loader in it when its size cannot be asked of it: ``Data(loader, size=10_000)``.

    Attributes:
        source: ``(x, y)`` tensors in memory, or a DataLoader.
        size: Number of examples N.
    """

    source: Any
    size: int

    def __post_init__(self) -> None:
        check_count("size", self.size)

    @property
    def in_memory(self) -> bool:
        """Whether all rows are held as two tensors."""
        return isinstance(self.source, tuple)

    @property
    def tensors(self) -> Batch:
        """All rows at once; a loader is read through."""
        if self.in_memory:
            return self.source
        batches = list(self)
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def batches(self, batch_size: int, *, seed: int = 0, epoch: int = 0, skip: int = 0) -> Iterator[Batch]:
        """One epoch of shuffled batches, from batch number ``skip`` on. A loader keeps its own batches and order."""
        if not self.in_memory:
            for number, batch in enumerate(self.source):
                if number >= skip:
                    yield _pair(batch)
            return
        x, y = self.source
        if batch_size >= self.size:
            if skip == 0:
                yield x, y
            return
        order = torch.randperm(self.size, generator=generator_for(seed, epoch))
        for rows in order.to(x.device).split(batch_size)[skip:]:
            yield x.index_select(0, rows), y.index_select(0, rows)

    def batches_per_epoch(self, batch_size: int) -> int:
        """How many batches one epoch has."""
        return -(-self.size // batch_size) if self.in_memory else max(1, len(self.source))

    def __iter__(self) -> Iterator[Batch]:
        """All rows in order, in batches large enough to be quick."""
        if not self.in_memory:
            yield from map(_pair, self.source)
            return
        x, y = self.source
        yield from zip(x.split(_CHUNK), y.split(_CHUNK), strict=True)

    def __repr__(self) -> str:
        if not self.in_memory:
            return f"Data({type(self.source).__name__}, size={self.size:,})"
        return f"Data(x={tuple(self.source[0].shape)}, y={tuple(self.source[1].shape)})"


class _Checked:
    """A loader whose batches are cast and checked for the model as they come."""

    def __init__(self, loader: DataLoader, model: Model, name: str):
        self.loader, self.model, self.name = loader, model, name

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.loader:
            yield _checked_pair(*_pair(batch), self.model, self.name)

    def __len__(self) -> int:
        return len(self.loader)


def as_data(data: Any, model: Model | None = None, *, name: str = "data", batch_size: int | None = None) -> Data:
    """Accept ``(x, y)``, a Dataset, a DataLoader or Data; check it against the model once.

    Args:
        data: What the user passed.
        model: The model that will see it: fixes dtype and device, and checks labels and shapes.
        name: What error messages call it.
        batch_size: Batch size for a Dataset that has to be loaded row by row.
    """
    if isinstance(data, Data):
        inner = as_data(data.source, model, name=name, batch_size=batch_size) if data.in_memory else data
        if data.in_memory and inner.size != data.size:
            raise InvalidArgument(f"{name}.size is {data.size}, but its tensors have {inner.size} rows.")
        return inner if data.in_memory else _loaded(data.source, data.size, model, name)
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, DataLoader):
        return _loaded(data, _size_of(data, name), model, name)
    if isinstance(data, IterableDataset):
        raise InvalidArgument(
            f"{name} is an IterableDataset, whose number of rows is unknown. Pass Data(DataLoader(...), size=N): the posterior "
            f"depends on N."
        )
    if isinstance(data, Dataset):
        if len(data) == 0:  # type: ignore[arg-type]
            raise InvalidData(f"{name} is empty: it has no rows.")
        loader = DataLoader(data, batch_size=batch_size or 128, shuffle=True)
        return _loaded(loader, len(data), model, name)  # type: ignore[arg-type]
    if not isinstance(data, tuple | list) or len(data) != 2:
        got = f"{len(data)} items" if isinstance(data, tuple | list) else type(data).__name__
        raise InvalidType(f"{name} must be a pair (x, y), a Dataset or a DataLoader; got {got}.")
    x, y = _checked_pair(*data, model, name)
    return Data((x, y), x.shape[0])


def as_input(x: Any, model: Model, *, name: str = "x") -> Tensor:
    """Check inputs alone, as for a prediction."""
    x = _to_tensor(x, name)
    _check_rows(x, name)
    _check_finite(x, name)
    return _cast(x, model)


def _loaded(loader: Any, size: int, model: Model | None, name: str) -> Data:
    if isinstance(loader, _Checked) or model is None:
        return Data(loader, size)
    return Data(_Checked(loader, model, name), size)


def _size_of(loader: DataLoader, name: str) -> int:
    try:
        size = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(
            f"{name} is a loader whose number of rows is unknown. Pass Data(loader, size=N): the posterior depends on N."
        ) from None
    if size == 0:
        raise InvalidData(f"{name} is empty: its dataset has no rows.")
    return size


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InvalidData(f"Each batch of the data must be a pair (x, y), got {type(batch).__name__}.")
    return batch[0], batch[1]


def _checked_pair(x: Any, y: Any, model: Model | None, name: str) -> Batch:
    x, y = _to_tensor(x, "x"), _to_tensor(y, "y")
    _check_rows(x, "x")
    if y.dim() == 0 or x.shape[0] != y.shape[0]:
        raise InvalidData(
            f"x and y must have the same number of rows, got x {tuple(x.shape)} and y {tuple(y.shape)} in {name}."
        )
    _check_finite(x, "x")
    if model is None:
        return x, y
    x = _cast(x, model)
    output = model.network.probe(x, model.network_params(model.params()), model.buffers())
    return x, model.likelihood.check_target(y.to(model.device), output)


def _cast(x: Tensor, model: Model) -> Tensor:
    """Numbers take the model's dtype; indices (for embeddings) stay whole."""
    return x.to(model.device, model.dtype) if x.is_floating_point() else x.to(model.device)


def _to_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if type(value).__module__.partition(".")[0] == "pandas":
        value = _from_pandas(value, name)
    try:
        array = np.asarray(value)
        if array.dtype == object:
            raise TypeError("it holds Python objects, not numbers")
        return torch.as_tensor(np.ascontiguousarray(array))
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"{name} must be a tensor, an array or a data frame of numbers, got {type(value).__name__}: {error}."
        ) from None


def _from_pandas(frame: Any, name: str) -> np.ndarray:
    kinds = frame.dtypes if frame.ndim == 2 else {frame.name: frame.dtype}
    for column, dtype in kinds.items():
        if dtype.kind not in "biuf":
            raise InvalidType(f"{name} column {column!r} holds {dtype}, not numbers. Encode it first or drop it.")
    return frame.to_numpy()


def _check_rows(x: Tensor, name: str) -> None:
    if x.dim() == 0:
        raise InvalidData(f"{name} must have rows (a first dimension), got a single number.")
    if x.shape[0] == 0:
        raise InvalidData(f"{name} is empty: shape {tuple(x.shape)} has no rows.")


def _check_finite(x: Tensor, name: str) -> None:
    if not x.is_floating_point() or torch.isfinite(x.sum()):
        return  # a finite sum has finite terms (an overflow only costs the slow look below)
    bad = torch.nonzero(~torch.isfinite(x))
    if len(bad) == 0:
        return
    where = bad[0].tolist()
    column = f", column {where[1] if len(where) == 2 else tuple(where[1:])}" if len(where) > 1 else ""
    raise InvalidData(
        f"{name} has {len(bad)} missing or infinite value{'s' if len(bad) > 1 else ''}, the first in row {where[0]}{column} "
        f"(counting from 0). Drop or fill {'them' if len(bad) > 1 else 'it'}."
    )
