"""What users pass as data: which are its inputs and targets, and how many rows it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from knowable.core.model.stream import SEVERAL, sampler_of
from knowable.core.network.inputs import as_rows
from knowable.core.support.tensors import check_rows
from knowable.errors import InvalidArgument, InvalidData, InvalidType


def is_dataset(data: Any) -> bool:
    """Whether it is one of knowable.datasets."""
    return isinstance(getattr(data, "x", None), Tensor) and isinstance(getattr(data, "y", None), Tensor)


def two_of(data: Any, name: str) -> tuple[Any, Any]:
    """Inputs and targets of data in memory."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if is_dataset(data):
        return data.x, data.y
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    if isinstance(data, tuple | list):
        got = f"{len(data)} items"
        hint = SEVERAL if len(data) > 2 else ""
        hint += " Weights of rows go beside them: kn.Data((x, y), weights=w)." if len(data) == 3 else ""
    else:
        got = f"{type(data).__name__}"
        hint = " Put inputs and targets in parentheses: (x, y)." if getattr(data, "ndim", 0) else ""
        if isinstance(data, Mapping):
            hint = " Say which of its entries is the target: kn.Data(..., target=...)."
    raise InvalidType(f"{name} must be a pair (x, y), a Dataset or a DataLoader; got {got}.{hint}")


def size_found(source: Any) -> int:
    """Number of rows of a source that was given no size."""
    if isinstance(source, tuple):
        x = as_rows(source[0], "x")
        return len(check_rows(x, "x") if isinstance(x, Tensor) else x)
    if isinstance(source, DataLoader):
        return size_of_loader(source, "data")
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return len(source)  # type: ignore[arg-type]
    raise InvalidArgument(
        f"size must be given: the number of rows of a {type(source).__name__} is not known, and the posterior depends "
        f"on it. Pass Data(loader, size=N)."
    )


def size_of_loader(loader: DataLoader, name: str) -> int:
    """Number of rows that a loader gives in an epoch."""
    try:
        size = len(sampler_of(loader))
    except TypeError:
        raise InvalidArgument(
            f"{name} is a loader whose number of rows is unknown, and the posterior depends on it. "
            f"Pass Data(loader, size=N)."
        ) from None
    if size == 0:
        raise InvalidData(f"{name} is empty: its dataset has no rows.")
    return size
