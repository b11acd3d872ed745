"""Arrays, data frames and lists as checked tensors; the threads that compute with them, the memory they leave."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knowable.errors import InvalidData, InvalidType


def to_tensor(value: Any, name: str) -> Tensor:
    """A tensor from a tensor, an array, a data frame or nested lists of numbers."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise InvalidType(
                f"{name} must be a dense tensor, got a sparse one ({value.layout}). Pass {name}.to_dense()."
            )
        if value.is_complex():
            raise InvalidType(
                f"{name} must be of real numbers, got {value.dtype}. Pass both parts: torch.view_as_real({name})."
            )
        return value.detach()
    if type(value).__module__.startswith("scipy.sparse"):
        raise InvalidType(f"{name} must be dense, got a sparse {type(value).__name__}. Pass {name}.toarray().")
    if isinstance(value, np.ma.MaskedArray):
        value = np.ma.filled(value.astype(float), np.nan) if np.ma.is_masked(value) else value.data
    if type(value).__module__.partition(".")[0] == "pandas":
        value = _from_pandas(value, name)
    try:
        array = np.asarray(value)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"it holds {_kind(array)}, not numbers (encode labels as whole numbers)")
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return torch.as_tensor(array if array.flags.writeable and array.flags.c_contiguous else array.copy(order="C"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidType(
            f"{name} must be a tensor, an array or a data frame of numbers, got {type(value).__name__}: {error}."
        ) from None


def check_rows(x: Tensor, name: str) -> Tensor:
    """Refuse a single number and an empty tensor."""
    if x.dim() == 0:
        raise InvalidData(f"{name} must have rows (a first dimension), got the single number {x.item()}.")
    if x.shape[0] == 0:
        raise InvalidData(f"{name} is empty: shape {tuple(x.shape)} has no rows.")
    return x


def check_finite(x: Tensor, name: str) -> Tensor:
    """Refuse missing and infinite values, naming the first one's row and column."""
    if not x.is_floating_point() or torch.isfinite(x.sum()):
        return x  # a finite sum has finite terms (an overflow only costs the slow look below)
    bad = torch.nonzero(~torch.isfinite(x))
    if len(bad) == 0:
        return x
    where = bad[0].tolist()
    column = f", column {where[1] if len(where) == 2 else tuple(where[1:])}" if len(where) > 1 else ""
    many = len(bad) > 1
    raise InvalidData(
        f"{name} has {len(bad)} missing or infinite value{'s' if many else ''}, the first in row {where[0]}{column} "
        f"(counting from 0). Drop or fill {'them' if many else 'it'}."
    )


def _from_pandas(frame: Any, name: str) -> np.ndarray:
    kinds = dict(frame.dtypes) if frame.ndim == 2 else {frame.name: frame.dtype}
    for column, dtype in kinds.items():
        if dtype.kind not in "biuf":
            raise InvalidType(f"{name} column {column!r} holds {dtype}, not numbers. Encode it first or drop it.")
    plain = set(kinds.values())
    if len(plain) == 1 and isinstance(next(iter(plain)), np.dtype):
        return frame.to_numpy()
    return frame.to_numpy(dtype=float, na_value=np.nan)  # mixed kinds, or pandas' own with missing values


def _kind(array: np.ndarray) -> str:
    if array.dtype.kind in "US":
        return "text"
    return "Python objects" if array.dtype == object else str(array.dtype)


_MANY = 100_000  # parameters, beyond which several threads pay


@contextmanager
def few_threads(parameters: int) -> Iterator[None]:
    """Compute with one thread inside, where a network has so few parameters that others would only wait.

    On a busy machine they wait for long, and the order in which they add up would change the last digits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if parameters <= _MANY else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def keep_free_memory() -> None:
    """Let the C library keep some tens of MB that it has free, for good; where it does not learn (glibc does): nothing.

    Training makes and frees the same tensors in every step. glibc gives free memory back above a threshold, and each
    page is fetched and zeroed again in the next step: for medium-sized networks a quarter of the time. The threshold
    follows the largest block that was freed so far, up to 32 MB; so one is freed here, which nobody has written to.
    """
    torch.empty(32 * 2**20 - 2**16, dtype=torch.uint8)  # freed at once


def give_back_free_memory() -> None:
    """Let the C library return what it holds free, where it can (glibc); otherwise nothing happens.

    Large tensors that come and go leave gaps that small ones move into, and the next large one finds no room: a long
    run can hold half as much again as it uses. The cost is that pages are fetched again when they are needed.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every C library
    if trim is not None:
        trim(0)
