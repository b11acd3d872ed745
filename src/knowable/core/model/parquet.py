"""Rows in Parquet and Arrow files that are larger than memory, read a row group at a time.

An epoch takes the row groups in random order, keeps so many rows of them as have a few megabytes, and gives batches of
these in random order. Both orders follow from one number that is drawn from torch's generator, and so from the seed of
the fit and the epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.row_source import RowSource
from knowable.core.support.checks import check_count, check_names
from knowable.core.support.processes import Processes
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument, InvalidData, InvalidType, MissingExtra

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
_BUFFER = 32 * 2**20  # bytes of rows that are shuffled together
_PIECE = 65_536  # rows that are decoded at once

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Block:
    """A row group of a Parquet file, or a record batch of an Arrow file."""

    file: str
    number: int
    rows: int

    def __str__(self) -> str:
        return f"row group {self.number} of {self.file}"


class ColumnFiles(RowSource):
    """Batches ``(x, y)`` of the rows of Parquet or Arrow files.

    Args:
        blocks: The row groups.
        features: Names of the columns that make up x, ``(batch, features)``.
        target: Name of the column y, ``(batch,)``, or names of several, ``(batch, targets)``.
        batch_size: Rows of a batch.
        shuffle: Whether an epoch comes in random order.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        features: Sequence[str],
        target: str | Sequence[str],
        batch_size: int,
        shuffle: bool,
    ):
        self.blocks, self.features, self.target = list(blocks), list(features), target
        self.batch_size, self.shuffle = batch_size, shuffle
        self.size = sum(each.rows for each in blocks)
        self.buffer = max(batch_size, _BUFFER // (4 * (len(self.features) + 1)))  # rows

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[Pair]:
        if not self.shuffle:
            yield from self.in_order()
            return
        generator = generator_for(int(torch.randint(2**62, ())), "row groups")
        order = torch.randperm(len(self.blocks), generator=generator).tolist()
        pieces = chain.from_iterable(self._pieces(self.blocks[number]) for number in order)
        yield from self._batches(pieces, self.buffer, generator)

    def in_order(self) -> Iterator[Pair]:
        """All rows once, in the order of the files."""
        pieces = chain.from_iterable(self._pieces(each) for each in self.blocks)
        yield from self._batches(pieces, self.batch_size, None)

    def share(self, processes: Processes) -> ColumnFiles | None:
        """Every W-th row group; None where there are fewer of them than processes."""
        own = self.blocks[processes.rank :: processes.count]
        few = len(self.blocks) < processes.count
        return None if few else ColumnFiles(own, self.features, self.target, self.batch_size, self.shuffle)

    def _batches(self, pieces: Iterable[Pair], most: int, generator: torch.Generator | None) -> Iterator[Pair]:
        """Batches of the rows of ``pieces``, of which ``most`` are shuffled together."""
        held: list[Pair] = []
        for piece in chain(pieces, [None]):
            held += [] if piece is None else [piece]
            count = sum(len(y) for _, y in held)
            if not count or (piece is not None and count < most):
                continue
            x, y = held[0] if len(held) == 1 else (torch.cat(each) for each in zip(*held, strict=True))
            order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
            whole = count if piece is None else count - count % self.batch_size
            for chosen in order[:whole].split(self.batch_size):
                yield x[chosen], y[chosen]
            rest = order[whole:]
            held = [(x[rest], y[rest])] if len(rest) else []

    def _pieces(self, block: Block) -> Iterator[Pair]:
        """The rows of a row group as tensors, some thousands at a time."""
        names = [self.target] if isinstance(self.target, str) else list(self.target)
        for table in _decoded(block, [*self.features, *names]):
            if not len(table):
                continue
            x = torch.empty(len(table), len(self.features))
            for number, name in enumerate(self.features):
                x[:, number] = _numbers(table.column(name), name, block)
            each = [_numbers(table.column(name), name, block) for name in names]
            yield x, each[0] if isinstance(self.target, str) else torch.stack(each, dim=1)


def open_files(
    paths: Any, *, target: str | Sequence[str], features: Sequence[str] | None, batch_size: int, shuffle: bool
) -> ColumnFiles:
    """Find the row groups of files, and check that the columns are there and are numbers."""
    check_count("batch_size", batch_size)
    files = _files(paths)
    chosen = None if features is None else check_names("features", features)
    targets = check_names("target", [target] if isinstance(target, str) else target)
    blocks: list[Block] = []
    for file in files:
        schema, rows = _layout(file)
        names = [name for name in schema.names if name not in targets] if chosen is None else chosen
        chosen = names if chosen is None else chosen
        for name in (*chosen, *targets):
            _check_column(schema, name, file)
        blocks += [Block(file, number, count) for number, count in enumerate(rows) if count]
    if not chosen:
        raise InvalidData(f"{files[0]} has no column beside the target. Name others: features=[...].")
    if not blocks:
        raise InvalidData(f"{files[0]} has no rows.")
    return ColumnFiles(blocks, chosen, target, batch_size, shuffle)


# --- files ------------------------------------------------------------------------------------------------------------


def _files(paths: Any) -> list[str]:
    """Names of files, in order; those in a folder by name."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    if not isinstance(paths, Iterable) or not all(isinstance(each, str | os.PathLike) for each in paths):
        raise InvalidType(f"paths must be the name of a file or a folder, or several, got {type(paths).__name__}.")
    found: list[str] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(str(each) for each in path.rglob("*") if each.suffix.lower() in SUFFIXES)
            if not inside:
                raise InvalidData(f"{path} has no file that ends in {', '.join(SUFFIXES)}.")
            found += inside
        elif not path.exists():
            raise InvalidData(f"There is no file {str(path)!r}. Check its name and the folder you are in.")
        elif path.suffix.lower() not in SUFFIXES:
            raise InvalidArgument(f"paths has {str(path)!r}, which does not end in {', '.join(SUFFIXES)}.")
        else:
            found.append(str(path))
    if not found:
        raise InvalidArgument("paths is empty: give the name of a file or a folder.")
    return found


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("Parquet and Arrow files need pyarrow: pip install 'knowable[data]'.") from None
    return pyarrow


def _is_parquet(file: str) -> bool:
    return SUFFIXES[Path(file).suffix.lower()] == "parquet"


def _layout(file: str) -> tuple[Any, list[int]]:
    """The schema of a file, and the number of rows of each row group."""
    pa = _pyarrow()
    try:
        if _is_parquet(file):
            with pa.parquet.ParquetFile(file) as opened:
                about = opened.metadata
                return opened.schema_arrow, [about.row_group(i).num_rows for i in range(about.num_row_groups)]
        with pa.memory_map(file) as source, pa.ipc.open_file(source) as opened:
            return opened.schema, [opened.get_batch(i).num_rows for i in range(opened.num_record_batches)]
    except (pa.ArrowException, OSError) as error:
        raise InvalidData(f"{file} cannot be read ({str(error).splitlines()[0]}). Write or copy it again.") from None


def _decoded(block: Block, names: list[str]) -> Iterator[Any]:
    """The columns of a row group, some thousands of rows at a time."""
    pa = _pyarrow()
    try:
        if _is_parquet(block.file):
            with pa.parquet.ParquetFile(block.file, memory_map=False, buffer_size=2**20) as opened:
                yield from opened.iter_batches(_PIECE, row_groups=[block.number], columns=names, use_threads=False)
            return
        with pa.memory_map(block.file) as source, pa.ipc.open_file(source) as opened:
            batch = opened.get_batch(block.number).select(names)
            for first in range(0, len(batch), _PIECE):
                yield batch.slice(first, _PIECE)
    except (pa.ArrowException, OSError) as error:
        raise InvalidData(f"{block} cannot be read ({str(error).splitlines()[0]}). Write or copy it again.") from None


def _check_column(schema: Any, name: str, file: str) -> None:
    if name not in schema.names:
        others = ", ".join(schema.names[:12])
        raise InvalidData(f"{file} has no column {name!r}. It has {others}{', ...' if len(schema.names) > 12 else ''}.")
    kind = schema.field(name).type
    types = _pyarrow().types
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        raise InvalidData(
            f"Column {name!r} of {file} has {kind} and no numbers. Turn it into numbers before it is written, or leave "
            f"it out: features=[...]."
        )


def _numbers(column: Any, name: str, block: Block) -> Tensor:
    """A column as float32, or int64 where it has whole numbers."""
    if column.null_count:
        raise InvalidData(
            f"Column {name!r} has {column.null_count} missing values in {block}. Fill them, or leave rows out."
        )
    values = torch.from_numpy(column.to_numpy(zero_copy_only=False).copy())
    if not values.is_floating_point():
        return values.to(torch.int64)
    values = values.to(torch.float32)
    if not torch.isfinite(values).all():
        count = int((~torch.isfinite(values)).sum())
        raise InvalidData(f"Column {name!r} has {count} values that are NaN or infinite in {block}.")
    return values
