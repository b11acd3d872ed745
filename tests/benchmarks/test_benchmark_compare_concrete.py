from __future__ import annotations

import pytest
from benchmarks.compare_concrete import (
    run,
    to_markdown,
)
from benchmarks.study import Rows


@pytest.mark.slow
def test_quick_run_is_killed_taken_up_and_shows_its_ranking(tmp_path):
    found = run(quick=True, only="*", rows=Rows(tmp_path / "compare_concrete.jsonl"))
    assert found["killed"]["error"] is None and 3 <= found["killed"]["fits"] < found["killed"]["of"] == 9
    assert found["found"]["error"] is None and found["found"]["kept"] is True and found["found"]["not_run"] == []
    text = to_markdown(found)
    assert "finished fits were kept" in text and "| 1 | " in text and "of a budget of 120 s" in text
    html = (tmp_path / "compare_concrete.html").read_text()
    assert found["found"]["best"] in html and "Paired difference from the best" in html and "±" in html
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compare_concrete.html", "compare_concrete.jsonl"]
