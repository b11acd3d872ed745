"""``knowable demo``."""

import pytest

import knowable as kn
from knowable.interfaces import demo
from tests.interfaces.cli.calling import call


@pytest.mark.slow
def test_a_self_contained_report_is_written(tmp_path):
    result = call("demo", "--quick", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Motorcycle, 40 measurements" in result.stdout and "Digits, 100 to learn from" in result.stdout
    assert "To act on: Accept a label when the entropy is at most" in result.stdout
    assert "knowable fit data.csv --target COLUMN" in result.stdout
    assert str(tmp_path / "out" / "report.html") in result.stdout
    assert "Mean-field VI" in page and "90% coverage" in page
    assert 'src="' not in page and 'href="http' not in page and page.count("<script") == 1


def test_a_bad_value_is_one_line_and_code_2(tmp_path):
    result = call("demo", "--seed", "-1", "--out", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "knowable: seed must be a whole number >= 0, got -1.\n"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "knowable: stopped from the keyboard\n"),
        (PermissionError(13, "Permission denied", "/out"), 2, "knowable: Permission denied: /out\n"),
        (kn.MissingExtra("Run:\n  pip"), 2, "knowable: Run: pip\n"),
    ],
)
def test_failures_are_one_line_with_their_own_code(error, code, message, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    result = call("demo")
    assert (result.exit_code, result.stderr) == (code, message)
