"""From a real file to a report, each command in a process of its own, within a minute; the report in a browser.

The minute is of the processor, and the fit is limited by steps: what runs beside the test does not count.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.real_files import write_breast_cancer, write_diabetes, write_motorcycle
from tests.interfaces.browser import Browser, find_chromium

MINUTE = 60.0


def knowable(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "knowable", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


def seconds_of_children() -> float:
    """Processor time of the processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_motorcycle, write_diabetes, write_breast_cancer])
def test_fit_predict_and_report_of_a_real_file(write, tmp_path: Path):
    path, target = write(tmp_path)
    run, started = tmp_path / "run", seconds_of_children()
    fitted = knowable("fit", path, "--target", target, "--budget", "quick", "--out", run, "--json")
    assert fitted.returncode in (0, 3), fitted.stderr  # 3: the budget ended the fit before it had settled
    predicted = knowable("predict", run, path, "--out", tmp_path / "predictions.csv")
    assert predicted.returncode == 0, predicted.stderr
    reported = knowable("report", run, "--out", tmp_path / "page.html")
    assert reported.returncode == 0, reported.stderr
    assert seconds_of_children() - started < MINUTE
    found = json.loads(fitted.stdout)
    assert found["scores"]["nll"]["value"] < found["guess_without_inputs"]["nll"]["value"]
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        assert sum(1 for _ in csv.reader(file)) == len(path.read_text(encoding="utf-8").splitlines())
    _look_at(tmp_path / "page.html", tmp_path)


def _look_at(page: Path, folder: Path) -> None:
    """No request leaves the page and nothing complains, on a screen and on a phone."""
    if find_chromium() is None:
        return
    browser = Browser(folder / "profile")
    try:
        for width in (1100, 390):
            browser.open(page, width=width, mobile=width < 500)
            browser.screenshot(folder / f"page-{width}.png")
            assert browser.requests == [page.resolve().as_uri()] and browser.complaints == []
    finally:
        browser.close()
