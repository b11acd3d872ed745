"""Finished fits are found again, torn lines are cut off, and other files are never touched."""

from __future__ import annotations

import json
import math

import pytest

from knowable.comparison.journal import FILE_NAME, Journal, Record
from knowable.errors import InvalidArgument, InvalidType

WHO = {"data": "d", "seed": "0"}
ONE = Record(
    "map", "MAP()", 2, "NUTS()", {"nll": 0.1 + 0.2, "seconds": 3.0}, {"ks": 1 / 3}, True,
    "settled", ("slow", "odd"), elapsed=4.0,
)  # fmt: skip


def test_a_finished_fit_is_found_again_to_the_last_bit(tmp_path):
    path = tmp_path / "deeper" / "fits.jsonl"
    Journal(path, WHO).add(ONE)
    again = Journal(path, WHO)
    assert len(again) == 1 and again.find("MAP()", "NUTS()", 2) == ONE
    assert again.find("MAP()", "", 2) is None and again.find("MAP()", "NUTS()", 1) is None
    assert again.seconds == 4.0


def test_scores_that_are_not_finite_survive(tmp_path):
    Journal(tmp_path / "a", WHO).add(Record("m", "m", 0, scores={"nll": math.inf}))
    found = Journal(tmp_path / "a", WHO).find("m", "", 0)
    assert found is not None and found.scores["nll"] == math.inf


def test_in_memory_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, WHO)
    journal.add(ONE)
    assert journal.find("MAP()", "NUTS()", 2) == ONE and list(tmp_path.iterdir()) == []


def test_failed_fits_are_tried_again_by_the_next_run(tmp_path):
    journal = Journal(tmp_path / "a", WHO)
    journal.add(Record("m", "m", 0, error="ValueError: no"))
    assert len(journal) == 0 and len(Journal(tmp_path / "a", WHO)) == 0


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_torn_by_a_kill_is_cut_off(tmp_path, cut):
    path = tmp_path / "a"
    journal = Journal(path, WHO)
    journal.add(ONE)
    whole = path.read_bytes()
    journal.add(Record("other", "other", 0))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Journal(path, WHO)
    assert len(again) == 1 and path.read_bytes() == whole
    again.add(Record("third", "third", 0))
    assert len(Journal(path, WHO)) == 2


def test_an_empty_file_is_begun_and_a_folder_gets_a_file(tmp_path):
    (tmp_path / "empty").touch()
    Journal(tmp_path / "empty", WHO).add(ONE)
    assert len(Journal(tmp_path / "empty", WHO)) == 1
    Journal(tmp_path, WHO).add(ONE)
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2\n",
        "{}\n",
        "[1]\n",
        '{"kind": "knowable comparison"}\n',
        '{"kind": "other", "identity": {}, "format": 1}\n',
    ],
)
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"mine\.csv' is a file of another kind"):
        Journal(path, WHO)
    assert path.read_text() == text


def test_another_comparison_is_refused_with_what_differs(tmp_path):
    Journal(tmp_path / "a", WHO).add(ONE)
    with pytest.raises(InvalidArgument, match="belongs to another comparison: data, model differ"):
        Journal(tmp_path / "a", {"data": "e", "seed": "0", "model": "m"})
    with pytest.raises(InvalidArgument, match="another comparison: seed differs"):
        Journal(tmp_path / "a", {**WHO, "seed": "1"})


def test_a_newer_format_is_refused(tmp_path):
    (tmp_path / "a").write_text(json.dumps({"kind": "knowable comparison", "format": 99, "identity": WHO}) + "\n")
    with pytest.raises(InvalidArgument, match="newer version"):
        Journal(tmp_path / "a", WHO)


def test_an_altered_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "a"
    Journal(path, WHO).add(ONE)
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(InvalidArgument, match="its line 3 is not a finished fit"):
        Journal(path, WHO)


def test_out_must_be_the_name_of_a_file():
    with pytest.raises(InvalidType, match="out must be the name of a file, got int 3"):
        Journal(3, WHO)  # type: ignore[arg-type]
