"""Reading a file of tensors (safetensors): checked in full before memory is taken, or mapped and checked when used.

The file begins with its length of eight bytes and a head of JSON, which says of every tensor what it is and where it
lies; the tensors follow without a gap. safetensors' own reader cannot read from within another file.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knowable.core.storage.files import Extent, parse_json
from knowable.errors import DamagedArtifact

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
MAPPED_FROM = 64 * 1024 * 1024
"""Bytes from which on a file has a hash for every block, so that draws can be mapped and not read."""
_LEAST_BLOCK = 256 * 1024  # bytes
_MOST_BLOCKS = 2**16
_MOST_HEAD = 32 * 1024 * 1024
_MOST_DIMS = 32
_MOST_NUMBERS = 2**48
_CHUNK = 4 * 1024 * 1024


@dataclass(frozen=True)
class Place:
    """A tensor in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int  # byte
    last: int  # the byte after


def block_hashes(extent: Extent) -> dict[str, Any] | None:
    """The hashes of all blocks of a large file, for its manifest; None for a small one."""
    if extent.size < MAPPED_FROM:
        return None
    length = max(_LEAST_BLOCK, 2 ** math.ceil(math.log2(extent.size / _MOST_BLOCKS)))
    starts = range(0, extent.size, length)
    hashes = [hashlib.sha256(extent.read(at, min(length, extent.size - at))).hexdigest() for at in starts]
    return {"bytes": length, "sha256": hashes}


def read_tensors(
    extent: Extent, entry: Mapping[str, Any], lazily: Callable[[str], bool] = lambda name: False
) -> tuple[dict[str, Tensor], Unchecked | None]:
    """The tensors of a file whose ``entry`` in the manifest has its size and hashes.

    Those that are read ``lazily``, by their names, are mapped where the file is large and has hashes of its blocks:
    nothing of them is read now, and :class:`Unchecked` checks what is used of them.
    """
    if extent.size != entry["bytes"]:
        raise _altered(extent)
    blocks = entry.get("blocks")
    try:
        places, start = _places(extent)
    except DamagedArtifact:
        if extent.sha256() != entry["sha256"]:  # then that is the reason
            raise _altered(extent) from None
        raise
    if blocks is not None and extent.size >= MAPPED_FROM and any(map(lazily, places)):
        return _mapped(extent, places, start, blocks, lazily)
    if extent.size > _memory_of_the_machine():
        raise _unreadable(extent, f"it has {extent.size:,} bytes, more than there is memory")
    digest = hashlib.sha256(extent.read(0, start))
    found = {}
    for name, place in places.items():  # in the order of the file
        found[name] = torch.empty(place.shape, dtype=place.dtype)
        if place.last == place.first:
            continue
        memory = memoryview(found[name].view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for at in range(0, len(memory), _CHUNK):
            extent.read_into(memory[at : at + _CHUNK], place.first + at)
            digest.update(memory[at : at + _CHUNK])
    if digest.hexdigest() != entry["sha256"]:
        raise _altered(extent)
    _check_truths(extent, found)
    return found, None


def _mapped(
    extent: Extent, places: Mapping[str, Place], start: int, blocks: Any, lazily: Callable[[str], bool]
) -> tuple[dict[str, Tensor], Unchecked]:
    memory = extent.mapped()
    unchecked = Unchecked(extent.name, memory, _checked_blocks(extent, blocks), blocks["bytes"])
    unchecked.check(0, start)
    found = {}
    for name, place in places.items():
        numbers = memory[place.first : place.last]
        if place.last == place.first:
            value = torch.empty(place.shape, dtype=place.dtype)
        else:
            value = torch.frombuffer(numbers, dtype=torch.uint8)
            value = value.clone() if place.first % place.dtype.itemsize or not lazily(name) else value
            value = value.view(place.dtype).view(place.shape)
        if lazily(name):
            unchecked.places[name] = place
        else:
            unchecked.check(place.first, place.last)
        found[name] = value
    _check_truths(extent, {name: value for name, value in found.items() if not lazily(name)})
    return found, unchecked


@dataclass(eq=False)
class Unchecked:
    """Tensors in mapped memory whose bytes are compared with their hashes when they are first used."""

    name: str
    memory: memoryview = field(repr=False)
    hashes: list[str] = field(repr=False)
    block: int  # bytes of a block
    places: dict[str, Place] = field(default_factory=dict, repr=False)
    _seen: set[int] = field(default_factory=set, repr=False)

    def check(self, first: int, last: int) -> None:
        """Check the blocks that hold the bytes from ``first`` to ``last``, those that were not checked before."""
        for number in range(first // self.block, -(-last // self.block)):
            if number not in self._seen:
                held = self.memory[number * self.block : (number + 1) * self.block]
                if hashlib.sha256(held).hexdigest() != self.hashes[number]:
                    raise DamagedArtifact(f"{self.name} was altered after it was saved: its hash is another.")
                self._seen.add(number)

    def check_rows(self, index: Tensor) -> None:
        """Check some rows of all tensors."""
        for place in self.places.values():
            size = (place.last - place.first) // max(1, place.shape[0])
            for row in index.tolist():
                self.check(place.first + row * size, place.first + (row + 1) * size)

    def check_all(self) -> None:
        """Check all tensors in full."""
        for place in self.places.values():
            self.check(place.first, place.last)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy, or another process, gets the tensors themselves
        self.check_all()
        return (_nothing, ())


def _nothing() -> None:
    return None


def _places(extent: Extent) -> tuple[dict[str, Place], int]:
    """Where the tensors are, in the order of the file, and where the first one begins; nothing is allocated."""
    if extent.size < 8:
        raise _unreadable(extent, "it is too short")
    length = int.from_bytes(extent.read(0, 8), "little")
    if length > min(_MOST_HEAD, extent.size - 8):
        raise _unreadable(extent, f"its head would take {length:,} bytes")
    try:
        head = parse_json(extent.read(8, length))
        found = {name: _place(about, 8 + length) for name, about in head.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(extent, f"its head has a wrong entry ({type(error).__name__}: {str(error)[:200]})") from None
    found = dict(sorted(found.items(), key=lambda item: (item[1].first, item[1].last)))
    end = 8 + length
    for name, place in found.items():
        if place.first != end:
            raise _unreadable(extent, f"tensor {name[:80]!r} overlaps another, or there is a gap in front of it")
        end = place.last
    if end != extent.size:
        raise _unreadable(extent, f"its tensors take {end:,} bytes, and it has {extent.size:,}")
    return found, 8 + length


def _place(about: Any, start: int) -> Place:
    dtype, shape, (first, last) = DTYPES[about["dtype"]], about["shape"], about["data_offsets"]
    if not isinstance(shape, list) or len(shape) > _MOST_DIMS:
        raise ValueError("a shape is no list of counts")
    numbers = [*shape, first, last]
    if any(type(each) is not int or not 0 <= each <= _MOST_NUMBERS for each in numbers):
        raise ValueError("a shape or a place is no count, or too large")
    if math.prod(each for each in shape if each) > _MOST_NUMBERS:
        raise ValueError("a tensor is too large")
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {str(shape)[:80]} takes {last - first:,} bytes")
    return Place(dtype, tuple(shape), start + first, start + last)


def _checked_blocks(extent: Extent, blocks: Any) -> list[str]:
    length, hashes = blocks["bytes"], blocks["sha256"]
    if type(length) is not int or length < 1 or len(hashes) != -(-extent.size // length):
        raise _unreadable(extent, "the manifest has not a hash for each of its blocks")
    return hashes


def _check_truths(extent: Extent, found: Mapping[str, Tensor]) -> None:
    """A byte that is neither 0 nor 1 is no truth value; what torch does with one is not defined."""
    for name, value in found.items():
        if value.dtype == torch.bool and value.numel() and int(value.view(torch.uint8).max()) > 1:
            raise _unreadable(extent, f"tensor {name[:80]!r} has truth values that are neither true nor false")


def _memory_of_the_machine() -> float:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not tell
        return math.inf


def _altered(extent: Extent) -> DamagedArtifact:
    return DamagedArtifact(
        f"{extent.name} was altered or truncated after it was saved: its hash does not match the manifest."
    )


def _unreadable(extent: Extent, why: str) -> DamagedArtifact:
    return DamagedArtifact(f"{extent.name} cannot be read as safetensors: {why}.")
