from __future__ import annotations

import json

from benchmarks.study import (
    Rows,
    own_process,
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
