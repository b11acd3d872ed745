"""Text is on the disk whole or not at all."""

from __future__ import annotations

import os

import pytest

from knowable.core.support.files import as_file, write_atomically
from knowable.errors import InvalidArgument, InvalidType


def test_text_replaces_what_was_there_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "new" / "text.txt"
    assert write_atomically(path, "first ± 1\n") == path
    write_atomically(str(path), "second\r\n")
    assert path.read_bytes() == b"second\r\n" and os.listdir(path.parent) == ["text.txt"]


def test_a_failed_write_leaves_the_old_text_and_no_debris(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    write_atomically(path, "old")

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr("knowable.core.support.files.os.replace", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["text.txt"]


def test_folders_and_things_that_are_no_path_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="is a folder"):
        write_atomically(tmp_path, "text")
    with pytest.raises(InvalidType, match="out must be the name of a file, got int 3"):
        as_file(3, name="out")  # type: ignore[arg-type]
