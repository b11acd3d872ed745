"""Checkpoints: a folder that always holds one complete state of a run."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from knowable.core.storage.folder import as_path, check_place, is_folder, read_folder, write_folder
from knowable.core.support.checks import check_number
from knowable.errors import InvalidArgument, InvalidType


@dataclass
class Checkpoint:
    """Where and how often a fit saves its state; a fit that finds its own state there goes on from it.

    Args:
        path: The folder.
        seconds: Least time between two saves.
    """

    path: str | os.PathLike[str]
    seconds: float = 30.0
    _identity: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _last: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        as_path(self.path)
        check_number("seconds", self.seconds, at_least=0)

    def begin(self, identity: dict[str, Any]) -> None:
        """Say which fit this is; its state can only be taken up by the same fit."""
        self._identity = {key: str(value) for key, value in identity.items()}
        self._last = time.monotonic()
        check_place(self.path, "checkpoint")

    @property
    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Save a state, replacing the last one atomically."""
        write_folder(self.path, "checkpoint", {"identity": self._identity, "state": content}, tensors)
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The saved state, None if there is none, an error if it belongs to another fit."""
        if not is_folder(self.path):
            return None
        saved, tensors = read_folder(self.path, "checkpoint")
        different = [key for key in self._identity if saved["identity"].get(key) != self._identity[key]]
        if different:
            raise InvalidArgument(
                f"checkpoint {str(Path(self.path))!r} belongs to another fit: {', '.join(different)} differ"
                f"{'s' if len(different) == 1 else ''}. Give another folder or delete this one."
            )
        return saved["state"], tensors


def as_checkpoint(value: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint | None:
    """Accept a folder's name or a Checkpoint."""
    if value is None or isinstance(value, Checkpoint):
        return value
    if not isinstance(value, str | os.PathLike):
        raise InvalidType(f"checkpoint must be the path of a folder or a Checkpoint, got {type(value).__name__}.")
    return Checkpoint(value)


def part_of(checkpoint: Checkpoint | None, name: str) -> Checkpoint | None:
    """A checkpoint inside another one's folder, for a fit that is made of several."""
    return None if checkpoint is None else Checkpoint(Path(os.fspath(checkpoint.path)) / name, checkpoint.seconds)
