"""Runs are whole or not there, and nothing is overwritten unasked."""

import json
import os

import pytest

from knowable.errors import DamagedArtifact, InvalidArgument
from knowable.interfaces.cli import run_folder
from knowable.interfaces.cli.run_folder import (
    RunFolder,
    check_file,
    check_place,
    new_run,
    write_file,
    write_history,
    write_json,
)

CONFIG = {"target": "y", "seed": 0, "made": {"knowable": "0.1", "task": "regression"}}


def make_run(folder, **extra):
    with new_run(folder, force=True) as partial:
        write_json(partial / run_folder.CONFIG, {**CONFIG, **extra})
    return folder


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_run_appears_whole_and_can_be_opened(tmp_path):
    folder = make_run(tmp_path / "deep" / "run")
    assert names(folder) == ["config.json"] and names(folder.parent) == ["run"]
    run = RunFolder.open(folder)
    assert run.options == {"target": "y", "seed": 0} and run.made["task"] == "regression"


def test_a_run_that_fails_while_it_is_written_leaves_nothing(tmp_path):
    def fail():
        with new_run(tmp_path / "run", force=False) as partial:
            (partial / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == []


def test_a_run_that_fails_leaves_the_earlier_one_as_it_was(tmp_path):
    folder = make_run(tmp_path / "run", seed=1)

    def fail():
        with new_run(folder, force=True) as partial:
            write_json(partial / run_folder.CONFIG, {**CONFIG, "seed": 2})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert RunFolder.open(folder).options["seed"] == 1 and names(tmp_path) == ["run"]


def test_force_puts_the_new_run_in_place_of_the_old_one_with_nothing_left_of_it(tmp_path):
    folder = make_run(tmp_path / "run", seed=1)
    (folder / "report.html").write_text("old")
    make_run(folder, seed=2)
    assert RunFolder.open(folder).options["seed"] == 2
    assert names(folder) == ["config.json"] and names(tmp_path) == ["run"]


def test_a_run_is_not_overwritten_without_force_and_other_things_never(tmp_path):
    folder = make_run(tmp_path / "run")
    with pytest.raises(InvalidArgument, match="--force"):
        check_place(folder, force=False)
    check_place(folder, force=True)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("mine")
    for force in (False, True):
        with pytest.raises(InvalidArgument, match="something else"):
            check_place(tmp_path / "papers", force=force)
        with pytest.raises(InvalidArgument, match="is a file"):
            check_place(tmp_path / "papers" / "thesis.tex" / "run", force=force)


def test_an_empty_folder_and_a_place_where_nothing_is_are_free(tmp_path):
    (tmp_path / "empty").mkdir()
    check_place(tmp_path / "empty", force=False)
    check_place(tmp_path / "a" / "b" / "c", force=False)
    make_run(tmp_path / "empty")
    assert names(tmp_path / "empty") == ["config.json"]


def test_folders_of_runs_can_be_read_by_others_as_the_umask_says(tmp_path):
    before = os.umask(0o022)
    try:
        folder = make_run(tmp_path / "run")
    finally:
        os.umask(before)
    assert (folder.stat().st_mode & 0o777, (folder / "config.json").stat().st_mode & 0o777) == (0o755, 0o644)


@pytest.mark.parametrize("text", ["{", "[]", '{"target": "y"}', '{"made": {}}', '{"made": 3}'])
def test_a_folder_that_is_no_run_is_refused_with_a_way_out(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidArgument, match="knowable fit"):
        RunFolder.open(tmp_path)


def test_a_place_where_nothing_is_is_no_run(tmp_path):
    with pytest.raises(InvalidArgument, match="There is no folder"):
        RunFolder.open(tmp_path / "run")


def test_a_run_that_lacks_a_file_says_which(tmp_path):
    run = RunFolder.open(make_run(tmp_path / "run"))
    assert "made" in run.read_text("config.json")
    with pytest.raises(DamagedArtifact, match=r"report\.json is missing"):
        run.read_text("report.json")


def test_files_are_whole_and_are_not_overwritten_without_force(tmp_path):
    path = tmp_path / "out.csv"
    write_file(path, "one\n", force=False)
    with pytest.raises(InvalidArgument, match="--force"):
        write_file(path, "two\n", force=False)
    write_file(path, "three\n", force=True)
    assert path.read_bytes() == b"three\n" and names(tmp_path) == ["out.csv"]


def test_a_file_goes_neither_over_a_folder_nor_into_one_that_is_not_there(tmp_path):
    with pytest.raises(InvalidArgument, match="is a folder"):
        check_file(tmp_path, force=True)
    with pytest.raises(InvalidArgument, match="there is no folder"):
        check_file(tmp_path / "no" / "out.csv", force=True)


def test_json_has_null_for_numbers_that_are_not_finite(tmp_path):
    write_json(tmp_path / "a.json", {"a": float("nan"), "b": [float("inf"), 1.5], "c": (2,)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": None, "b": [None, 1.5], "c": [2]}


def test_the_history_has_a_column_for_every_term_and_a_gap_where_a_record_has_none(tmp_path):
    write_history(tmp_path / "h.csv", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0, "kl": 1.0}])
    assert (tmp_path / "h.csv").read_text() == "step,loss,kl\n1,2.5,\n2,2.0,1.0\n"
    write_history(tmp_path / "none.csv", [])
    assert (tmp_path / "none.csv").read_text() == "step,epoch\n"
