from __future__ import annotations

import json

import pytest
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


def test_full_run_follows_the_plan_unless_rounds_are_given():
    (planned,) = run_benchmark("tiny_benchmark")["cases"]
    (given,) = run_benchmark("tiny_benchmark", rounds=2)["cases"]
    assert planned["plan"] == {"rounds": 3, "inner": 2, "warmup": 1}
    assert len(planned["contenders"]["short"]["milliseconds"]) == 3
    assert len(given["contenders"]["short"]["milliseconds"]) == 2


def test_only_the_cases_asked_for_are_run():
    assert run_benchmark("tiny_benchmark", quick=True, only="other*")["cases"] == []


def test_command_line_prints_and_writes_where_told(tmp_path, capsys):
    assert main(["epoch", "--quick", "--case", "narrow", "--out", str(tmp_path)]) == 0
    assert "# epoch" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch.json", "epoch.md"]


def test_quick_and_partial_runs_do_not_touch_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.run.RESULTS", tmp_path)
    main(["epoch", "--quick", "--case", "narrow"])
    main(["prediction", "--quick"])
    main(["epoch", "--case", "none", "--no-memory"])
    assert list(tmp_path.iterdir()) == []


def test_unknown_benchmark_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        main(["step_tme"])
    assert (
        "no benchmark 'step_tme'; there are step_time, variational_steps, prediction, epoch, stochastic_gradient, "
        "ensembles, laplace, gradients" in capsys.readouterr().err
    )
