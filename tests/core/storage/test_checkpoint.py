"""Tests of checkpoints: whose state it is, and when it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import knowable as kn
from knowable.core.storage.folder import Checkpoint, as_checkpoint, part_of
from tests.core.cases import linear_data, linear_model, same_params

STATE = {"step": 3, "history": [{"loss": 0.1}]}
TENSORS = {"theta": torch.randn(3), "count": torch.tensor(4)}


def _checkpoint(path: Path, **identity) -> Checkpoint:
    checkpoint = Checkpoint(path, seconds=0)
    checkpoint.begin({"seed": 0, **identity})
    return checkpoint


def test_a_saved_state_comes_back(tmp_path):
    _checkpoint(tmp_path / "run").save(STATE, TENSORS)
    content, tensors = _checkpoint(tmp_path / "run").load()
    assert content == STATE
    assert same_params(tensors, TENSORS)


def test_there_is_no_state_before_the_first_save(tmp_path):
    assert _checkpoint(tmp_path / "run").load() is None
    assert not (tmp_path / "run").exists()


def test_a_second_save_replaces_the_first(tmp_path):
    checkpoint = _checkpoint(tmp_path / "run")
    checkpoint.save(STATE, TENSORS)
    checkpoint.save({"step": 4}, {"theta": torch.zeros(1)})
    content, tensors = checkpoint.load()
    assert content == {"step": 4}
    assert list(tensors) == ["theta"]
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_the_state_of_another_fit_is_refused_saying_what_differs(tmp_path):
    _checkpoint(tmp_path / "run", method="MAP()", data="a").save(STATE, TENSORS)
    with pytest.raises(
        kn.InvalidArgument, match=r"'.*run' belongs to another fit: method differs\. Give another folder"
    ):
        _checkpoint(tmp_path / "run", method="MAP(epochs=3)", data="a").load()
    with pytest.raises(kn.InvalidArgument, match="another fit: method, data differ"):
        _checkpoint(tmp_path / "run", method="other", data="b").load()


def test_a_damaged_state_is_refused_and_not_taken_for_none(tmp_path):
    _checkpoint(tmp_path / "run").save(STATE, TENSORS)
    (file,) = (tmp_path / "run").glob("*.safetensors")
    file.unlink()
    with pytest.raises(kn.DamagedArtifact, match="is incomplete"):
        _checkpoint(tmp_path / "run").load()


def test_a_save_is_due_when_its_time_has_passed(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("knowable.core.storage.folder.time.monotonic", lambda: now[0])
    checkpoint = Checkpoint(tmp_path / "run", seconds=30)
    checkpoint.begin({})
    assert not checkpoint.due
    now[0] = 131.0
    assert checkpoint.due
    checkpoint.save(STATE, TENSORS)
    assert not checkpoint.due


def test_a_place_that_cannot_hold_a_checkpoint_is_refused_before_the_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(kn.Model, "score", lambda *arguments: pytest.fail("the fit began"))
    (tmp_path / "file").write_text("hello")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("hello")
    for place, wanted in (("file", "is a file"), ("file/below", "is a file"), ("mine", r"notes\.txt")):
        with pytest.raises(kn.InvalidArgument, match=wanted):
            kn.MAP(epochs=2).fit(linear_model(), linear_data(), checkpoint=tmp_path / place)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "hello"


def test_a_posterior_is_neither_taken_up_nor_overwritten_by_a_fit(tmp_path):
    posterior = kn.MAP(epochs=2).fit(linear_model(), linear_data())
    posterior.save(tmp_path / "run")
    with pytest.raises(kn.KnowableError, match="posterior"):
        kn.MAP(epochs=2).fit(linear_model(), linear_data(), checkpoint=tmp_path / "run")
    assert same_params(kn.load(tmp_path / "run").mean(), posterior.mean())


@pytest.mark.parametrize("value", [5, b"run", ["run"]])
def test_what_is_not_a_path_is_refused(value):
    with pytest.raises(kn.InvalidType, match="checkpoint must be the path of a folder or a Checkpoint, got"):
        as_checkpoint(value)


def test_names_and_paths_become_checkpoints(tmp_path):
    assert as_checkpoint(None) is None
    assert as_checkpoint("run").path == "run"
    assert as_checkpoint(tmp_path).path == tmp_path
    checkpoint = Checkpoint(tmp_path)
    assert as_checkpoint(checkpoint) is checkpoint


@pytest.mark.parametrize(("arguments", "wanted"), [(("run", -1), "seconds must be"), ((5,), "path must be")])
def test_fields_are_checked(arguments, wanted):
    with pytest.raises(kn.KnowableError, match=wanted):
        Checkpoint(*arguments)


def test_a_part_of_a_checkpoint_is_a_folder_inside(tmp_path):
    part = part_of(Checkpoint(tmp_path, 3.0), "member 1")
    assert part is not None
    assert (part.path, part.seconds) == (tmp_path / "member 1", 3.0)
    assert part_of(None, "member 1") is None
