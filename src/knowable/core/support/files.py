"""Files that are written atomically: a reader finds the old content or the new one, never half of it."""

from __future__ import annotations

import os
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
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return file


def flush(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
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
