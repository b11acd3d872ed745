"""Saving that is killed, or finds no room or no right to write, leaves the old artifact or the new one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import knowable as kn
from tests.core.cases import atoms, linear_model
from tests.integration import killed_saves
from tests.integration.killed_saves import KINDS

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.integration.killed_saves", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2000)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_save_that_is_killed_leaves_the_old_artifact_or_the_new_one(tmp_path, seed):
    _run(str(tmp_path), "4", str(seed))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(KINDS.values())  # all else was cleared away
    assert {len(list((tmp_path / name).iterdir())) for name in ("saved", "state")} == {2}


@pytest.mark.slow
@pytest.mark.timeout(2000)
def test_two_hundred_kills_leave_the_old_artifact_or_the_new_one(tmp_path, seed):
    print(_run(str(tmp_path), "70", str(seed)))


# --- no room, no right, no folder ------------------------------------------------------------------------------------


def test_a_disk_without_room_is_told_and_the_old_one_stays(tmp_path):
    _run("--without-room", str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only the superuser may mount a disk")
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_is_told_and_the_old_one_stays(kind, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no disk may be mounted here")
    try:
        killed_saves.save(kind, disk / KINDS[kind], killed_saves.posterior(0), 7)
        (disk / "rest").write_bytes(bytes(300_000))
        with pytest.raises(kn.CannotSave, match=r"No space left on device.*is unchanged"):
            killed_saves.save(kind, disk / KINDS[kind], killed_saves.posterior(0), 8)
        assert killed_saves.saved(kind, disk / KINDS[kind]) == 7
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("name", ["saved", "saved.knowable"])
def test_a_place_that_cannot_be_written_is_told(name, monkeypatch, tmp_path):
    # the superuser may write anywhere, so that the system's answer is put in its mouth
    posterior = atoms(linear_model(), 2)
    path = posterior.save(tmp_path / name)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    for function in ("replace",) if name == "saved" else ("mkdir", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, refuse)
            with pytest.raises(kn.CannotSave, match=r"cannot be saved: Permission denied\. .*unchanged"):
                atoms(linear_model(), 3).save(path, overwrite=True)
        assert len(kn.load(path)) == 2
    with pytest.raises(kn.CannotSave, match="cannot be saved"):
        posterior.save("/proc/nowhere/saved" if name == "saved" else "/proc/nowhere/saved.knowable")


@pytest.mark.parametrize("name", ["saved", "saved.knowable"])
def test_a_folder_that_goes_while_it_is_written_is_told(name, monkeypatch, tmp_path):
    from knowable.core.storage import files, folder

    target = tmp_path / "runs" / name
    atoms(linear_model(), 2).save(target)
    where, function = (folder, "block_hashes") if name == "saved" else (files, "_header")
    original = getattr(where, function)

    def going(*arguments: Any) -> Any:
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        return original(*arguments)

    monkeypatch.setattr(where, function, going)
    with pytest.raises(kn.KnowableError, match=r"cannot be saved|is incomplete"):
        atoms(linear_model(), 3).save(target, overwrite=True)
    monkeypatch.undo()
    assert len(kn.load(atoms(linear_model(), 3).save(target))) == 3  # and it can be saved again


def test_resources_are_given_back(tmp_path):
    path = atoms(linear_model(), 2).save(tmp_path / "saved.knowable")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(30):
        kn.load(path).predict(torch.zeros(1, 2, dtype=torch.float64))
    after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert after <= before + 2
