"""Tests of folders on disk: what comes back, what every kind of damage does, what a crash leaves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from knowable.core.storage import folder as storage
from knowable.core.storage.files import MOST_JSON_BYTES, Extent
from knowable.core.storage.folder import (
    FORMAT_VERSION,
    MANIFEST,
    check_place,
    is_folder,
    read_folder,
    tensor_fingerprint,
    write_folder,
)
from knowable.errors import DamagedArtifact, InvalidArgument, InvalidType
from tests.core.artifacts import rewrite
from tests.core.cases import same_params

CONTENT = {"name": "Größe", "numbers": [1, 2.5, 1e-300, -0.1], "nothing": None, "nested": {"b": [True], "a": {}}}
TENSORS = {"weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(7)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "saved", "thing", CONTENT, TENSORS)


def test_whoever_may_read_the_manifest_may_read_the_tensors(folder: Path):
    """A service runs as another user than the one who saved."""
    assert len({entry.stat().st_mode for entry in folder.iterdir()}) == 1


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return read_folder(folder, "thing")


def _tensors_file(folder: Path) -> Path:
    (file,) = folder.glob("tensors-*.safetensors")
    return file


def _rewrite_manifest(folder: Path, **changes: Any) -> None:
    rewrite(folder / MANIFEST, **changes)


# --- what comes back ------------------------------------------------------------------------------------------------


def test_content_and_tensors_come_back(folder):
    content, tensors = _read(folder)
    assert content == CONTENT
    assert same_params(tensors, TENSORS)


def test_numbers_that_are_not_finite_come_back(tmp_path):
    write_folder(tmp_path, "thing", {"best": float("-inf")}, {"a": torch.tensor([torch.nan, torch.inf])})
    content, tensors = _read(tmp_path)
    assert content == {"best": float("-inf")}
    torch.testing.assert_close(tensors["a"], torch.tensor([torch.nan, torch.inf]), equal_nan=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3).double(), torch.randn(3).bfloat16(), torch.tensor([True, False]),
        torch.arange(5).to(torch.uint8), torch.zeros(0, 4), torch.tensor(3.0), torch.arange(12.0).view(3, 4).T,
        torch.zeros(3).expand(4, 3),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)  # fmt: skip
def test_tensors_of_every_kind_come_back(tensor, tmp_path):
    write_folder(tmp_path, "thing", {}, {"a": tensor, "shares its memory": tensor})
    found = _read(tmp_path)[1]
    assert torch.equal(found["a"], tensor)
    assert found["a"].dtype == tensor.dtype
    assert torch.equal(found["shares its memory"], tensor)


def test_a_folder_without_tensors_comes_back(tmp_path):
    write_folder(tmp_path / "a" / "b", "thing", {"x": 1}, {})
    assert read_folder(str(tmp_path / "a" / "b"), "thing") == ({"x": 1}, {})


def test_tensors_come_back_where_torch_would_put_them(tmp_path):
    write_folder(tmp_path / "a", "thing", {}, {f"{n}": torch.arange(float(n)) for n in range(1, 9)})
    _, found = read_folder(tmp_path / "a", "thing")
    assert {value.data_ptr() % 64 for value in found.values()} == {0}


def test_only_json_and_safetensors_are_written(folder):
    assert sorted(file.suffix for file in folder.iterdir()) == [".json", ".safetensors"]
    json.loads((folder / MANIFEST).read_text())


def test_is_folder_says_whether_something_was_saved(folder, tmp_path):
    assert is_folder(folder)
    assert not is_folder(tmp_path)
    assert not is_folder(tmp_path / "nowhere")


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DamagedArtifact, match=r"There is no folder .*nowhere"):
        _read(tmp_path / "nowhere")


def test_damage_is_also_an_os_error(tmp_path):
    with pytest.raises(OSError):
        _read(tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 8, 50, -1])
def test_truncated_tensors_are_refused(keep, folder):
    file = _tensors_file(folder)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedArtifact, match="altered or truncated after it was saved"):
        _read(folder)


def test_tensors_with_something_appended_are_refused(folder):
    with _tensors_file(folder).open("ab") as stream:
        stream.write(b"\0")
    with pytest.raises(DamagedArtifact, match="altered or truncated"):
        _read(folder)


def test_any_flipped_bit_of_the_tensors_is_refused(folder, seed):
    file = _tensors_file(folder)
    original = file.read_bytes()
    for bit in random.Random(seed).sample(range(8 * len(original)), 100):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(DamagedArtifact, match="altered or truncated"):
            _read(folder)


def test_any_flipped_bit_of_the_manifest_is_refused_or_changes_nothing(folder, seed):
    # e and E in a number or a letter's case in an escape mean the same: then everything must come back as it was
    file = folder / MANIFEST
    original = file.read_bytes()
    for bit in random.Random(seed).sample(range(8 * len(original)), 400):
        damaged = bytearray(original)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            content, tensors = _read(folder)
        except DamagedArtifact:
            continue
        assert content == CONTENT
        assert same_params(tensors, TENSORS)


@pytest.mark.parametrize("keep", [0, 1, 30, 200, -1])
def test_a_truncated_manifest_is_refused(keep, folder):
    file = folder / MANIFEST
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(DamagedArtifact, match="is not a readable manifest"):
        _read(folder)


@pytest.mark.parametrize(
    "text",
    ["not json", "[]", "null", "3", "{}", '{"body": 3, "sha256": ""}', '{"body": {}}', "[" * 100_000, "\xff\xfe"],
)
def test_a_manifest_that_is_something_else_is_refused(text, folder):
    (folder / MANIFEST).write_text(text, encoding="latin-1")
    with pytest.raises(DamagedArtifact, match="is not a readable manifest"):
        _read(folder)


def test_a_manifest_too_large_to_be_one_is_refused_without_reading_it(folder, monkeypatch):
    os.truncate(folder / MANIFEST, MOST_JSON_BYTES + 1)  # sparse: takes no room
    monkeypatch.setattr(Extent, "read_into", lambda *arguments: pytest.fail("it was read"))
    with pytest.raises(DamagedArtifact, match=r"is too large to be a manifest.json \([\d,]+ bytes\)"):
        _read(folder)


@pytest.mark.parametrize("missing", [MANIFEST, "tensors"])
def test_a_missing_file_is_refused_by_name(missing, folder):
    file = folder / MANIFEST if missing == MANIFEST else _tensors_file(folder)
    file.unlink()
    with pytest.raises(DamagedArtifact, match=rf"({file.name} is missing|has no {file.name})"):
        _read(folder)


def test_a_newer_format_asks_for_an_upgrade(folder):
    _rewrite_manifest(folder, format=FORMAT_VERSION + 1)
    with pytest.raises(DamagedArtifact, match=rf"has format {FORMAT_VERSION + 1}; .* reads up to .*Upgrade knowable"):
        _read(folder)


def test_another_kind_is_refused(folder):
    with pytest.raises(DamagedArtifact, match="holds a thing, not a posterior"):
        read_folder(folder, "posterior")


@pytest.mark.parametrize("entry", ["kind", "tensors", "content"])
def test_a_manifest_that_lacks_an_entry_is_refused(entry, folder):
    _rewrite_manifest(folder, **{entry: None})
    with pytest.raises(DamagedArtifact):
        _read(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "{outside}", "..", ".", "", "/"])
def test_tensors_outside_the_folder_are_never_read(name, folder, tmp_path):
    outside = tmp_path / "outside.safetensors"
    save_file({"secret": torch.ones(3)}, outside)
    digest = hashlib.sha256(outside.read_bytes()).hexdigest()
    entry = {"name": name.format(outside=outside), "sha256": digest, "bytes": outside.stat().st_size}
    _rewrite_manifest(folder, tensors=entry)
    with pytest.raises(DamagedArtifact, match=r"is missing|is incomplete"):
        _read(folder)


def test_a_pickle_in_place_of_the_tensors_is_never_loaded(folder):
    stream = io.BytesIO()
    torch.save({"weight": torch.ones(2)}, stream)
    file = _tensors_file(folder)
    file.write_bytes(stream.getvalue())
    entry = {"name": file.name, "sha256": hashlib.sha256(stream.getvalue()).hexdigest(), "bytes": file.stat().st_size}
    _rewrite_manifest(folder, tensors=entry)
    with pytest.raises(DamagedArtifact, match="as safetensors"):
        _read(folder)


# --- replacing ------------------------------------------------------------------------------------------------------


def test_a_second_save_replaces_the_first_and_leaves_nothing_behind(folder):
    write_folder(folder, "thing", {"new": 1}, {"a": torch.zeros(2)})
    content, tensors = _read(folder)
    assert content == {"new": 1}
    assert list(tensors) == ["a"]
    assert len(list(folder.iterdir())) == 2


def test_saving_the_same_tensors_again_keeps_them(folder):
    write_folder(folder, "thing", {"new": 1}, TENSORS)
    assert same_params(_read(folder)[1], TENSORS)


class _Crash(Exception):
    pass


CRASHES = [
    ("save_file", 1),
    ("block_hashes", 1),
    *((f"os.{name}", call) for name in ("replace", "fsync") for call in (1, 2)),
]


@pytest.mark.parametrize(("where", "call"), CRASHES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("existing", [True, False])
def test_a_crash_at_any_moment_leaves_the_old_folder_or_the_new_one(
    where, call, after, existing, tmp_path, monkeypatch
):
    path = tmp_path / "saved"
    if existing:
        write_folder(path, "thing", CONTENT, TENSORS)
    count = [0]
    target = os if where.startswith("os.") else storage
    original = getattr(target, where.removeprefix("os."))

    def crashing(*arguments):
        count[0] += 1
        if count[0] == call and not after:
            raise _Crash
        result = original(*arguments)
        if count[0] == call:
            raise _Crash
        return result

    with monkeypatch.context() as patch:
        patch.setattr(target, where.removeprefix("os."), crashing)
        with pytest.raises(_Crash):
            write_folder(path, "thing", {"new": 1}, {"a": torch.ones(3)})
    if is_folder(path):
        content, tensors = _read(path)
        assert (content == CONTENT and same_params(tensors, TENSORS)) or (
            content == {"new": 1} and torch.equal(tensors["a"], torch.ones(3))
        )
    else:
        assert not existing
    write_folder(path, "thing", {"newer": 2}, TENSORS)  # and the next save works and cleans up
    assert _read(path)[0] == {"newer": 2}
    assert len(list(path.iterdir())) == 2


def test_a_reader_beside_a_writer_finds_the_old_folder_or_the_new_one(folder, monkeypatch):
    # the writer replaces everything between the reader's look at the manifest and at the tensors
    read, done = storage._read_manifest, []

    def overtaken(path: Path) -> dict[str, Any]:
        body = read(path)
        if not done:
            done.append(True)
            write_folder(folder, "thing", {"new": 1}, {"a": torch.zeros(2)})
        return body

    monkeypatch.setattr(storage, "_read_manifest", overtaken)
    content, tensors = _read(folder)
    assert (content, list(tensors)) == ({"new": 1}, ["a"])


def test_content_that_is_not_json_is_refused_and_the_old_folder_stays(folder):
    with pytest.raises(InvalidArgument, match=r"This cannot be saved: .*set"):
        write_folder(folder, "thing", {"a": {1, 2}}, {"a": torch.zeros(2)})
    assert _read(folder)[0] == CONTENT


# --- places that are not ours ---------------------------------------------------------------------------------------


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("hello")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidArgument, match="is a file"):
            write_folder(path, "thing", CONTENT, TENSORS)
    assert (tmp_path / "file").read_text() == "hello"


@pytest.mark.parametrize("name", ["notes.txt", "movie.partial", "tensors-mine.safetensors", "manifest.json", ".hidden"])
def test_a_folder_with_other_files_is_refused_and_left_alone(name, tmp_path):
    (tmp_path / name).write_text('{"name": "another program"}')
    with pytest.raises(InvalidArgument, match=r"something else in it|other files in it"):
        write_folder(tmp_path, "thing", CONTENT, TENSORS)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_saved_folder_with_a_foreign_file_beside_it_is_refused_and_left_alone(folder):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match=r"something else in it|other files in it"):
        write_folder(folder, "thing", {"new": 1}, {})
    assert _read(folder)[0] == CONTENT
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_folder_of_another_kind_is_not_overwritten(folder):
    with pytest.raises(InvalidArgument, match="thing"):
        write_folder(folder, "posterior", {}, {})
    assert _read(folder)[0] == CONTENT


def test_an_empty_folder_is_used(tmp_path):
    write_folder(tmp_path, "thing", CONTENT, TENSORS)
    assert _read(tmp_path)[0] == CONTENT


@pytest.mark.parametrize("path", [5, None, b"saved"])
def test_what_is_not_a_path_is_refused(path):
    with pytest.raises(InvalidType, match="path must be the name of a folder, got"):
        write_folder(path, "thing", CONTENT, TENSORS)
    with pytest.raises(InvalidType, match="path must be the name of a folder, got"):
        read_folder(path, "thing")


# --- fingerprints ---------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_values_shapes_and_dtypes():
    tensor = torch.arange(6.0)
    others = [tensor.view(2, 3), tensor.double(), tensor + 1e-6 * (torch.arange(6) == 5), tensor[:5], tensor.flip(0)]
    prints = [tensor_fingerprint(each) for each in [tensor, *others]]
    assert len(set(prints)) == len(prints)
    assert tensor_fingerprint(tensor.clone()) == prints[0]


def test_a_fingerprint_depends_on_how_values_are_split_over_tensors():
    a, b = torch.zeros(2), torch.zeros(3)
    assert len({tensor_fingerprint(a, b), tensor_fingerprint(b, a), tensor_fingerprint(torch.zeros(5))}) == 3


@pytest.mark.parametrize(
    "tensor", [torch.tensor(3.0), torch.zeros(0), torch.zeros(3, 0), torch.tensor([True]), torch.randn(4, 2).T]
)
def test_tensors_of_every_shape_have_a_fingerprint(tensor):
    assert len(tensor_fingerprint(tensor)) == 64


def test_the_fingerprint_of_much_data_looks_at_evenly_spaced_rows():
    data = torch.randn(100_000, 3)
    moved = data.clone()
    moved[::195] += 1.0  # every row that is looked at
    assert tensor_fingerprint(data) != tensor_fingerprint(moved)
    assert tensor_fingerprint(data) != tensor_fingerprint(data[:-1])


def test_what_a_killed_save_leaves_behind_is_no_obstacle(tmp_path):
    folder = tmp_path / "state"
    write_folder(folder, "checkpoint", {}, {"x": torch.zeros(2)})
    for left in (".tmprhpNbV", "tensors.12.partial", "manifest.json.12.partial", ".manifest.12.partial.json"):
        (folder / left).write_text("half")
    check_place(folder, "checkpoint")
    write_folder(folder, "checkpoint", {}, {"x": torch.ones(2)})
    assert not list(folder.glob(".tmp*")) and not list(folder.glob("*.partial*"))
    assert torch.equal(read_folder(folder, "checkpoint")[1]["x"], torch.ones(2))
