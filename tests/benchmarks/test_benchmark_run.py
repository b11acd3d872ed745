from __future__ import annotations

import json

from benchmarks.report import write
from benchmarks.run import main, run_benchmark


def test_quick_run_of_tiny_contenders_reports_all_of_them(tmp_path):
    data, page = write(run_benchmark("tiny_benchmark", quick=True), tmp_path)
    result = json.loads(data.read_text())
    (case,) = result["cases"]
    contenders = case["contenders"]
    assert result["quick"] and case["plan"] == {"rounds": 2, "inner": 1, "warmup": 1}
    assert list(contenders) == ["short", "long", "absent", "broken", "hungry"]
    assert contenders["absent"]["error"] == "ModuleNotFoundError: No module named 'no_such_package_anywhere'"
    assert contenders["broken"]["error"] == "ValueError: a first | line"
    assert contenders["short"]["ratio"] == {"median": 1.0, "lower": 1.0, "upper": 1.0, "minimum": 1.0}
    assert contenders["long"]["time"]["minimum"] >= 4.0
    text = page.read_text()
    assert "## Tiny contenders (quick)" in text
    assert "| absent | failed: ModuleNotFoundError: No module named 'no_such_package_anywhere' |" in text
    assert "no-such-package-anywhere not installed" in text


def test_quick_and_partial_runs_do_not_touch_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.run.RESULTS", tmp_path)
    main(["epoch", "--quick", "--case", "narrow"])
    main(["prediction", "--quick"])
    main(["epoch", "--case", "none", "--no-memory"])
    assert list(tmp_path.iterdir()) == []
