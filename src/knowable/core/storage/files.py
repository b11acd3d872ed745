"""The files of an artifact, in a folder or in one uncompressed archive, read without following anything elsewhere.

An archive is a zip file whose members are stored as they are, each at a multiple of 64 bytes, so that they can be read
in their place. Its list of members is checked in full before anything is read: names that climb, members that overlap,
are compressed, encrypted or there twice are refused. In a folder only regular files are opened, never links.
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import re
import shutil
import stat
import struct
import threading
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from knowable.core.support.files import is_running, replace_folder, write_atomically
from knowable.errors import CannotSave, DamagedArtifact, InvalidArgument, InvalidType, KnowableError

SUFFIX = ".knowable"
"""Names that end in this are written as one file."""

MOST_JSON_BYTES = 64 * 1024 * 1024
_MOST_JSON_VALUES = 4_000_000
_MOST_MEMBERS = 1000
_CHUNK = 1024 * 1024
_ALIGNMENT = 64
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}){0,7}")

_END, _END_SIGN = struct.Struct("<4s4H2LH"), b"PK\5\6"  # the end of an archive
_LOCATOR, _LOCATOR_SIGN = struct.Struct("<4sLQL"), b"PK\6\7"  # before it, in one of more than 4 GB
_END64, _END64_SIGN = struct.Struct("<4sQ2H2L4Q"), b"PK\6\6"  # and before that
_ENTRY, _ENTRY_SIGN = struct.Struct("<4s6H3L5H2L"), b"PK\1\2"  # a member in the list at the end
_LOCAL, _LOCAL_SIGN = struct.Struct("<4s5H3L2H"), b"PK\3\4"  # a member, in front of its bytes
_ELSEWHERE = 0xFFFFFFFF  # in place of a number that does not fit in four bytes
_UTF8 = 0x800  # the one flag of a member that changes nothing here


class _Handle:
    """An open file."""

    def __init__(self, path: Path):
        flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
        if path.is_symlink():
            raise DamagedArtifact(f"{path} is a link, and links are not followed. Copy what it points to (cp -L).")
        try:
            number = os.open(path, flags)
        except FileNotFoundError:
            raise DamagedArtifact(f"{path.parent} is incomplete: {path.name} is missing. Save it again.") from None
        except OSError as error:
            raise DamagedArtifact(f"{path} cannot be read: {error.strerror}.") from None
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise DamagedArtifact(f"{path} is not a regular file.")
        self.stream, self.lock = io.FileIO(number), threading.Lock()
        self.size = os.fstat(number).st_size
        weakref.finalize(self, self.stream.close)


@dataclass(frozen=True)
class Extent:
    """A stretch of an open file."""

    name: str  # for messages
    handle: _Handle
    start: int
    size: int
    crc: int | None = None  # of a member of an archive

    def read_into(self, buffer: memoryview, place: int) -> None:
        """Fill ``buffer`` with the bytes from ``place`` on."""
        done = 0
        while done < len(buffer):
            with self.handle.lock:
                self.handle.stream.seek(self.start + place + done)
                count = self.handle.stream.readinto(buffer[done:])  # pyright: ignore[reportArgumentType]
            if not count:
                raise DamagedArtifact(f"{self.name} ends too early: it was truncated.")
            done += count

    def read(self, place: int, count: int) -> bytes:
        """``count`` bytes from ``place`` on."""
        if place < 0 or count < 0 or place + count > self.size:
            raise DamagedArtifact(f"{self.name} ends too early: it was truncated.")
        found = bytearray(count)
        self.read_into(memoryview(found), place)
        return bytes(found)

    def chunks(self) -> Iterator[bytes]:
        """All bytes, a piece at a time."""
        for place in range(0, self.size, _CHUNK):
            yield self.read(place, min(_CHUNK, self.size - place))

    def sha256(self) -> str:
        """The hash of all bytes."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()

    def mapped(self) -> memoryview:
        """The bytes as memory that is read from the disk when it is looked at; writing changes a copy."""
        before = self.start % mmap.ALLOCATIONGRANULARITY
        whole = mmap.mmap(
            self.handle.stream.fileno(), self.size + before, access=mmap.ACCESS_COPY, offset=self.start - before
        )
        return memoryview(whole)[before:]


@dataclass(frozen=True)
class Files:
    """The files of an artifact, or of a folder inside of one.

    Attributes:
        path: The folder, or the archive.
        hashes: SHA-256 of every file by its name, where they are known from elsewhere: each is checked when it is read.
    """

    path: Path
    hashes: Mapping[str, str] | None = None
    within: str = ""  # the folder inside, "" or ending in "/"
    _members: Mapping[str, Extent] | None = field(default=None, repr=False)  # of an archive

    @classmethod
    def at(cls, path: str | os.PathLike[str] | Files) -> Files:
        """Those of a folder or an archive, whichever ``path`` is."""
        if isinstance(path, Files):
            return path
        place = as_path(path)
        if place.is_file():
            return cls(place, _members=_members_of(_Handle(place.resolve()), place))
        return cls(place)

    def with_hashes(self, hashes: Mapping[str, str]) -> Files:
        """The same files, each checked against its hash when it is read."""
        return Files(self.path, hashes, self.within, self._members)

    @property
    def archived(self) -> bool:
        """Whether it is an archive."""
        return self._members is not None

    def folder(self, name: str) -> Files:
        """The files of a folder inside."""
        return Files(self.path, self.hashes, f"{self.within}{name}/", self._members)

    def has(self, name: str) -> bool:
        """Whether there is a file or a folder of this name."""
        if self._members is None:
            return os.path.lexists(self.path / self.within / name)
        place = self.within + name
        return place in self._members or any(each.startswith(place + "/") for each in self._members)

    def names(self) -> list[str]:
        """All files, those of folders inside too, without hidden ones."""
        if self._members is not None:
            return sorted(each.removeprefix(self.within) for each in self._members if each.startswith(self.within))
        return sorted(_names_in(self.path / self.within, ""))

    def open(self, name: str) -> Extent:
        """A file, to be read in pieces: whoever does so checks its hash."""
        if _NAME.fullmatch(self.within + name) is None:
            raise DamagedArtifact(f"{self} refers to a file with the name {name[:80]!r}, which no artifact has.")
        if self._members is not None:
            if self.within + name not in self._members:
                raise DamagedArtifact(f"{self} is incomplete: {name} is missing. Save it again.")
            return self._members[self.within + name]
        folder = self.path
        for part in (self.within + name).split("/")[:-1]:
            folder /= part
            if folder.is_symlink():
                raise DamagedArtifact(
                    f"{folder} is a link, and links are not followed. Copy what it points to (cp -rL)."
                )
        handle = _Handle(folder / name.rpartition("/")[2])
        return Extent(str(folder / name.rpartition("/")[2]), handle, 0, handle.size)

    def read(self, name: str, most: int = MOST_JSON_BYTES) -> bytes:
        """A small file."""
        found = self.open(name)
        if found.size > most:
            raise DamagedArtifact(f"{found.name} is too large to be a {Path(name).name} ({found.size:,} bytes).")
        content = found.read(0, found.size)
        if found.crc is not None and zlib.crc32(content) != found.crc:
            raise DamagedArtifact(f"{found.name} was altered or truncated after it was saved: its checksum is another.")
        if self.hashes is not None and hashlib.sha256(content).hexdigest() != self.hashes.get(self.within + name):
            raise DamagedArtifact(f"{found.name} was altered after it was signed.")
        return content

    def read_json(self, name: str) -> Any:
        """A file of JSON, of bounded size and depth."""
        try:
            return parse_json(self.read(name))
        except ValueError as error:
            raise DamagedArtifact(f"{self}: {name} is not readable JSON ({error}). Save it again.") from None

    def __str__(self) -> str:
        inside = self.within.rstrip("/")
        return str(self.path / inside) if inside else str(self.path)


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path, or an error if it is not one."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidType(f"path must be the name of a folder, got {type(path).__name__} {path!r}.")
    return Path(path)


def parse_json(content: bytes) -> Any:
    """JSON whose values cannot take more than a few hundred megabytes; ValueError if it is anything else."""
    if sum(content.count(each) for each in (b",", b"[", b"{")) > _MOST_JSON_VALUES:
        raise ValueError("too many values")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _names_in(folder: Path, within: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        name = within + entry.name
        if entry.is_symlink() or _NAME.fullmatch(name) is None:
            raise DamagedArtifact(f"{entry.path} does not belong in an artifact: a link, or an unusual name.")
        if entry.is_dir():
            yield from _names_in(Path(entry.path), name + "/")
        else:
            yield name


# --- the list of an archive's members --------------------------------------------------------------------------------


def _members_of(handle: _Handle, path: Path) -> dict[str, Extent]:
    whole = Extent(str(path), handle, 0, handle.size)
    try:
        return _checked_members(whole, path)
    except (struct.error, ValueError) as error:
        raise DamagedArtifact(f"{path} is not an artifact, or was damaged: {error}.") from None


def _checked_members(whole: Extent, path: Path) -> dict[str, Extent]:
    if whole.size < _END.size:
        raise ValueError("it is too short")
    sign, disk, first, here, count, length, start, comment = _END.unpack(whole.read(whole.size - _END.size, _END.size))
    if sign != _END_SIGN or comment:
        raise ValueError("it has not the end of an archive")
    end = whole.size - _END.size
    if end >= _LOCATOR.size and whole.read(end - _LOCATOR.size, 4) == _LOCATOR_SIGN:
        _, _, place, _ = _LOCATOR.unpack(whole.read(end - _LOCATOR.size, _LOCATOR.size))
        sign, _, _, _, disk, first, here, count, length, start = _END64.unpack(whole.read(place, _END64.size))
        end = place
        if sign != _END64_SIGN:
            raise ValueError("it has not the end of a large archive")
    if disk or first or here != count or count > _MOST_MEMBERS or start + length != end:
        raise ValueError("the list of its members is not where it should be")
    if length > _MOST_MEMBERS * 1024:
        raise ValueError("the list of its members is too long")
    found, spans, listed, place = dict[str, Extent](), [(start, start)], whole.read(start, length), 0
    for _ in range(count):
        name, span, extent, place = _member(whole, path, listed, place)
        if name in found:
            raise ValueError(f"{name} is in it twice")
        found[name] = extent
        spans.append(span)
    spans.sort()
    if place != length or any(one[1] > other[0] for one, other in pairwise(spans)):
        raise ValueError("its members overlap")
    return found


def _member(whole: Extent, path: Path, listed: bytes, place: int) -> tuple[str, tuple[int, int], Extent, int]:
    """A member of the list: its name, the bytes it takes with what is in front of it, itself, and where the next is."""
    (sign, _, _, flags, method, _, _, crc, packed, size, of_name, of_extra, of_comment, _, _, attributes, header) = (
        _ENTRY.unpack_from(listed, place)
    )
    after = place + _ENTRY.size + of_name + of_extra + of_comment
    if sign != _ENTRY_SIGN or after > len(listed):
        raise ValueError("the list of its members is cut short")
    name = listed[place + _ENTRY.size :][:of_name].decode("ascii", "replace")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"it has a member with the name {name[:80]!r}, which no artifact has")
    if method or flags & ~_UTF8 or stat.S_IFMT(attributes >> 16) not in (0, stat.S_IFREG):
        raise ValueError(f"{name} is compressed, encrypted, or not a regular file; members are stored as they are")
    extra = listed[place + _ENTRY.size + of_name :][:of_extra]
    size, packed, header = _large(extra, [size, packed, header])
    if size != packed or header + _LOCAL.size > whole.size:
        raise ValueError(f"the size of {name} is wrong")
    local = _LOCAL.unpack(whole.read(header, _LOCAL.size))
    begins = header + _LOCAL.size + local[9] + local[10]
    if (
        local[0] != _LOCAL_SIGN
        or whole.read(header + _LOCAL.size, local[9]) != name.encode()
        or local[2:4] != (flags, 0)
    ):
        raise ValueError(f"{name} is not where the list says")
    if begins + size > whole.size:
        raise ValueError(f"{name} ends after the end of the file")
    return name, (header, begins + size), Extent(f"{path}/{name}", whole.handle, begins, size, crc), after


def _large(extra: bytes, numbers: list[int]) -> list[int]:
    """Numbers of a member with those that did not fit in four bytes, which are in a field of their own."""
    place, wide = 0, b""
    while place + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, place)
        if kind == 1:
            wide = extra[place + 4 :][:length]
        place += 4 + length
    missing = [at for at, number in enumerate(numbers) if number == _ELSEWHERE]
    for at, number in zip(missing, struct.unpack_from(f"<{len(missing)}Q", wide), strict=True):
        numbers[at] = number
    return numbers


# --- writing one file ------------------------------------------------------------------------------------------------


@contextmanager
def destination(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """The folder to write an artifact into: ``path`` itself, or one that becomes the file ``path`` at the end.

    A name that ends in ``.knowable`` is that of a file. It takes its place, and that of an older one if ``overwrite``
    is true, in a single step.
    """
    file = as_path(path)
    if file.suffix != SUFFIX:
        yield file
        return
    check_file_place(file, overwrite=overwrite)
    with saving(file), beside(file) as folder:
        yield folder
        pack(Files.at(folder), file)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """The name of a folder beside ``path`` for what is not ready yet; it is gone afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_after_the_killed(path)
    folder = path.with_name(f".{path.name}.{os.getpid()}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of ``path`` and all that was there when the block ends well."""
    with saving(path), beside(Path(os.path.abspath(path))) as folder:
        folder.mkdir()
        yield folder
        replace_folder(folder, Path(os.path.abspath(path)))


def check_file_place(file: Path, *, overwrite: bool) -> None:
    """Refuse to write an archive where something else is, or over one that may not be replaced."""
    if file.is_dir():
        raise InvalidArgument(f"path {str(file)!r} is a folder; names that end in {SUFFIX} are those of files.")
    if not file.exists():
        return
    if not overwrite:
        raise InvalidArgument(
            f"path {str(file)!r} already holds what was saved before. Pass another path, or overwrite=True to replace "
            f"it."
        )
    try:
        Files.at(file)
    except DamagedArtifact:
        raise InvalidArgument(
            f"path {str(file)!r} is a file of another kind. Pass another name, or delete it."
        ) from None


def pack(files: Files, path: Path, more: Mapping[str, bytes] | None = None) -> Path:
    """Write an archive of ``files``, and of ``more``, which replace those of the same name, atomically."""
    given = dict(more or {})

    def write(partial: Path) -> None:
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_STORED) as archive:
            for name in sorted({*files.names(), *given}):
                extent = None if name in given else files.open(name)
                size = len(given[name]) if extent is None else extent.size
                with archive.open(_header(archive, name, size), "w", force_zip64=size > zipfile.ZIP64_LIMIT) as out:
                    for chunk in [given[name]] if extent is None else extent.chunks():
                        out.write(chunk)

    return write_atomically(path, write)


def _header(archive: zipfile.ZipFile, name: str, size: int) -> zipfile.ZipInfo:
    """The head of a member after which its bytes begin at a multiple of 64."""
    info = zipfile.ZipInfo(name)  # of the first of January 1980: the same files make the same archive
    info.external_attr, info.file_size = (stat.S_IFREG | 0o644) << 16, size
    wide = 20 if size > zipfile.ZIP64_LIMIT else 0
    begins = archive.fp.tell() + _LOCAL.size + len(name) + wide + 4  # type: ignore[union-attr]
    padding = -begins % _ALIGNMENT
    info.extra = struct.pack("<2H", 0xD935, padding) + bytes(padding)
    return info


def _clear_after_the_killed(file: Path) -> None:
    """Delete what processes that were killed while they wrote this file have left beside it."""
    names = (re.escape(f".{file.name}.") + r"(\d+)\.partial", re.escape(f".{file.stem}.") + rf"(\d+)\.partial{SUFFIX}")
    for entry in file.parent.iterdir():
        found = next(filter(None, (re.fullmatch(each, entry.name) for each in names)), None)
        if found and not is_running(int(found[1])):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Say what went wrong where the disk is full or the place cannot be written."""
    try:
        yield
    except OSError as error:
        if isinstance(error, KnowableError):
            raise
        raise CannotSave(
            f"{path} cannot be saved: {error.strerror or error}. What was saved there before is unchanged."
        ) from error
