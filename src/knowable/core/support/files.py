"""Text on disk that is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from knowable.errors import InvalidArgument, InvalidType


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write ``text`` to ``path``, replacing what was there in one step; folders that lack are made.

    Whoever reads at any moment, even after a kill, finds the old text or the new one.

    Raises:
        InvalidType: If ``path`` is not the name of a file.
        InvalidArgument: If it is a folder.
    """
    file = as_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return file


def as_file(path: str | os.PathLike[str], *, name: str = "path") -> Path:
    """The path of a file that is or may come to be, or an error that calls it ``name``."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidType(f"{name} must be the name of a file, got {type(path).__name__} {path!r}.")
    file = Path(path)
    if file.is_dir():
        raise InvalidArgument(f"{name} must be the name of a file, but {str(file)!r} is a folder.")
    return file
