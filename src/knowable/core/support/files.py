"""Files that are written atomically: a reader finds the old content or the new one, never half of it."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from knowable.errors import InvalidArgument, InvalidType


def write_atomically(path: str | os.PathLike[str], content: str | Callable[[Path], object]) -> Path:
    """Write a file and replace the old one in a single step; missing folders are created.

    The content goes to a hidden file beside ``path`` (with the same suffix), is flushed to the disk, and is renamed. A
    process that is killed in between leaves the old file as it was.

    Args:
        path: Name of the file.
        content: The text, or a function that writes the file whose path it is given.

    Raises:
        InvalidType: If ``path`` is not the name of a file.
        InvalidArgument: If it is a folder.
    """
    file = as_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.stem}.{os.getpid()}.partial{file.suffix}")
    try:
        if isinstance(content, str):
            partial.write_text(content, encoding="utf-8", newline="")
        else:
            content(partial)
        flush(partial)
        os.replace(partial, file)
        flush(file.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return file


def replace_folder(new: Path, place: Path) -> None:
    """Put the folder ``new`` in the place of another one, which goes; where the system can, in a single step.

    Linux can exchange two names at once. Elsewhere a process that is killed between two renames leaves the old folder
    beside its place, under a name that ends in ``.old``.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        os.rename(new, place)
    elif not _exchange(new, place):
        old = Path(tempfile.mkdtemp(prefix=f".{place.name}.", suffix=".old", dir=place.parent))
        os.rename(place, old)
        try:
            os.rename(new, place)
        except OSError:
            os.rename(old, place)
            raise
        new = old
    flush(place.parent)
    shutil.rmtree(new, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in a single step, if this system can."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def is_running(process: int) -> bool:
    """Whether there is a process of this number; True where that cannot be told."""
    if os.name == "nt":  # where asking would be a signal
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's, or the number is none
        return True
    return True


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    if os.name == "nt" and path.is_dir():  # a folder cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_file(path: str | os.PathLike[str], *, name: str = "path") -> Path:
    """The path of a file, which need not exist; errors call the argument ``name``."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidType(f"{name} must be the name of a file, got {type(path).__name__} {path!r}.")
    file = Path(path)
    if file.is_dir():
        raise InvalidArgument(f"{name} must be the name of a file, but {str(file)!r} is a folder.")
    return file


def check_folder(folder: Path, *, name: str = "path", ours: Callable[[str], bool] = lambda entry: False) -> None:
    """Refuse to write into a folder that cannot be made, or that has entries of another origin.

    Args:
        folder: The folder, which need not exist.
        name: What errors call it.
        ours: Whether an entry of the folder, by its name, may be replaced.
    """
    parent = next((each for each in [folder, *folder.parents] if each.exists()), folder)
    if not parent.is_dir():
        raise InvalidArgument(
            f"{name} {str(folder)!r} cannot be a folder: {str(parent)!r} is a file. Pass another name."
        )
    foreign = sorted(each.name for each in folder.iterdir() if not ours(each.name)) if folder.is_dir() else []
    if foreign:
        raise InvalidArgument(
            f"{name} {str(folder)!r} is a folder with something else in it ({foreign[0]}). Pass a new or empty one."
        )
