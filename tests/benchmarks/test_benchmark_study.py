from __future__ import annotations

import json
import os

from benchmarks.study import (
    THREADS,
    Rows,
    child_environment,
    describe,
    last_line,
    own_process,
    page,
    table,
    write_study,
)


def test_rows_are_found_again_by_the_next_run(tmp_path):
    path = tmp_path / "deeper" / "rows.jsonl"
    Rows(path).add("a", {"error": None, "value": 1.5})
    again = Rows(path)
    assert again.get("a") == {"error": None, "value": 1.5} and again.get("b") is None
    again.add("b", {"value": 2})
    assert len(Rows(path)) == 2


def test_half_written_line_of_a_killed_run_is_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    Rows(path).add("a", {"value": 1})
    with path.open("a") as file:
        file.write('["b", {"val')
    rows = Rows(path)
    rows.add("c", {"value": 3})
    found = Rows(path)
    assert (found.get("a"), found.get("b"), found.get("c")) == ({"value": 1}, None, {"value": 3})
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_failed_rows_are_tried_again_next_time(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add("a", {"error": "ValueError: no"})
    assert rows.get("a") == {"error": "ValueError: no"}  # in this run it stands
    assert Rows(tmp_path / "rows.jsonl").get("a") is None


def test_what_ran_out_of_time_is_not_tried_again(tmp_path):
    out_of_time = own_process("timeit", ["-s", "import time", "time.sleep(60)"], timeout=0.5)
    assert out_of_time == {"error": "took more than 0 s", "ran_out": True}
    Rows(tmp_path / "rows.jsonl").add("a", out_of_time)
    assert Rows(tmp_path / "rows.jsonl").get("a") == out_of_time


def test_complete_run_leaves_no_rows_behind(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.add("a", {"value": 1})
    rows.forget()
    assert list(tmp_path.iterdir()) == []
    Rows().forget()  # nothing kept, nothing to remove


def test_last_line_is_read_and_a_missing_one_is_explained():
    assert last_line('noise\n{"value": 1}\n', 0) == {"value": 1}
    assert last_line("", 1, "Traceback\nValueError: no") == {"error": "the process ended with code 1: ValueError: no"}
    assert last_line("", -9) == {"error": "the process ended with code -9"}


def test_process_of_its_own_has_the_threads_and_an_empty_cache(tmp_path):
    environment = child_environment(str(tmp_path))
    assert environment["OMP_NUM_THREADS"] == str(THREADS)
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
    assert environment["PATH"] == os.environ["PATH"]


def test_module_that_says_nothing_is_an_error():
    said = own_process("no_such_module_anywhere", [], timeout=60.0)
    assert said["error"].startswith("the process ended with code 1") and "No module named" in said["error"]


def test_table_fills_short_rows_and_keeps_bars_apart():
    text = table("Title", ("a", "b", "c"), [["1|2", "x"]], "A note.")
    assert "| 1\\|2 | x |  |" in text and text.startswith("## Title") and "A note." in text


def test_study_is_written_as_data_and_page(tmp_path):
    run = describe("name", quick=True, packages=("numpy",), value=3)
    data, sheet = write_study(run, page(run, "some text"), tmp_path)
    assert (data.name, sheet.name) == ("name.json", "name.md")
    assert json.loads(data.read_text())["value"] == 3
    assert "# name" in sheet.read_text() and "Quick run" in sheet.read_text() and "some text" in sheet.read_text()
