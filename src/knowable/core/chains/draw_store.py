"""Draws kept within a memory budget: where they would not fit, every second one is dropped.

Thinning keeps the chain's law: an evenly spaced part of a chain is a chain with the same target.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from knowable.errors import InvalidArgument

DTYPES = {"same": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
_LEAST = 8  # draws of each chain that max_memory must hold
_FIRST = 64  # rows of a new store that does not know how many will come
_LONG = 4096  # bytes of a draw: from there on draws are put in another order one by one, without a second copy


class DrawStore:
    """A growing array of draws ``(kept, chains, D)``: transitions number 0, stride, 2 stride, ..."""

    def __init__(
        self,
        chains: int,
        dimension: int,
        *,
        dtype: torch.dtype,
        max_bytes: int | None = None,  # most that the draws may take
        expected: int = _FIRST,  # most draws that will come: room for them is made at once, so that it need not grow
        file: str | os.PathLike[str] | None = None,  # that holds the draws instead of memory; an older one is replaced
    ):
        self.chains, self.dimension, self.dtype, self.stride = chains, dimension, dtype, 1
        self.most = rows_within(max_bytes, chains, dimension, dtype)
        self.file = None if file is None else _new_file(Path(file))
        self.seen = 0  # transitions offered so far
        self.kept = 0
        self.first_rows = max(1, expected if self.most is None else min(expected, self.most))
        self._data = self._space(self.first_rows)

    @property
    def draws(self) -> Tensor:
        """The draws kept, ``(kept, chains, D)``, a view."""
        return self._data[: self.kept]

    def by_chain(self) -> Tensor:
        """The draws kept, ``(chains, kept, D)``, one chain after the other; on disk where a file holds them.

        For the end of a run: memory or file then hold them in this order, and the store takes no more.
        """
        if self.file is None and self.dimension * self.dtype.itemsize < _LONG:
            return self.draws.transpose(0, 1).contiguous()
        if self.file is None:
            _transpose_in_place(self.draws)
            return self.draws.view(self.chains, self.kept, self.dimension)
        partial = self.file.with_name(self.file.name + ".partial")
        ordered = _mapped(_new_file(partial), (self.chains, self.kept, self.dimension), self.dtype)
        for chain in range(self.chains):
            ordered[chain] = self.draws[:, chain]
        os.replace(partial, self.file)  # what this store has mapped stays readable
        return ordered

    def add(self, positions: Tensor) -> None:
        """Offer the next transitions ``(n, chains, D)``."""
        for row in positions:
            if self.seen % self.stride == 0:
                if self.kept == len(self._data):
                    self._make_room()
                if self.seen % self.stride == 0:  # the stride may just have doubled
                    self._data[self.kept] = row
                    self.kept += 1
            self.seen += 1

    def back_to(self, seen: int) -> None:
        """Forget all but the first ``seen`` transitions that were offered.

        The stride stays, even if it has grown since: the same transitions offered again end as the same draws.
        """
        self.kept, self.seen = -(-seen // self.stride), seen

    def restore(self, draws: Tensor, seen: int, stride: int) -> None:
        """Take up the state of an earlier store."""
        self._data = self._space(max(self.first_rows, len(draws)))
        self._data[: len(draws)] = draws
        self.kept, self.seen, self.stride = len(draws), seen, stride

    def _make_room(self) -> None:
        if self.most is not None and len(self._data) >= self.most:  # full: every second one goes
            half = self._data[: self.kept : 2].clone()
            kept, stride = len(half), 2 * self.stride
            # no call between these two lines, so that an interrupt from the keyboard cannot come between them
            self._data[:kept] = half
            self.kept, self.stride = kept, stride
            return
        rows = 2 * len(self._data)
        larger = self._space(rows if self.most is None else min(rows, self.most))
        if self.file is None:  # a longer mapping of a file begins with what the file holds
            larger[: self.kept] = self.draws
        self._data = larger

    def _space(self, rows: int) -> Tensor:
        shape = (rows, self.chains, self.dimension)
        return torch.empty(shape, dtype=self.dtype) if self.file is None else _mapped(self.file, shape, self.dtype)


def _transpose_in_place(draws: Tensor) -> None:
    """Put draws ``(n, chains, D)`` in the order of ``(chains, n, D)``, moving each draw once, around its cycle."""
    n, chains, _ = draws.shape
    flat = draws.view(n * chains, -1)
    done = bytearray(n * chains)
    for first in range(n * chains):
        if done[first]:
            continue
        held, at = flat[first].clone(), first
        while True:  # what belongs at place (c, i) is at (i, c)
            done[at] = 1
            source = (at % n) * chains + at // n
            if source == first:
                break
            flat[at] = flat[source]
            at = source
        flat[at] = held


def rows_within(max_bytes: int | None, chains: int, dimension: int, dtype: torch.dtype) -> int | None:
    """How many draws of all chains fit in ``max_bytes``; an error if that is hardly any."""
    if max_bytes is None:
        return None
    each = chains * dimension * dtype.itemsize
    most = max_bytes // each
    if most < _LEAST:
        raise InvalidArgument(
            f"max_memory={max_bytes:,} holds fewer than {_LEAST} draws of {chains} chains ({each:,} bytes each). "
            f"Allow more, use fewer chains, or storage=kn.ChainStorage(dtype='bfloat16') or (file=...)."
        )
    return most


def _new_file(path: Path) -> Path:
    """Make way for a file; draws that an earlier run left there and that are still in use keep their data."""
    if path.is_dir():
        raise InvalidArgument(f"file must be the name of a file, got the folder {str(path)!r}. Add a file name.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(f"file={str(path)!r} cannot be written: {error.strerror}.") from None
    return path


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory is a file, made longer if need be."""
    numbers = math.prod(shape)
    path.touch()
    if path.stat().st_size < numbers * dtype.itemsize:  # torch would also do it, and overwrite the first byte with zero
        os.truncate(path, numbers * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=numbers, dtype=dtype).view(shape)
