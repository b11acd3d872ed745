"""``knowable report``: the page of a run."""

import json

from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import number_rows, write_csv


def test_the_page_made_again_from_the_run_is_the_page_of_the_fit(runs):
    page = (runs / "numbers" / "report.html").read_bytes()
    result = call("report", runs / "numbers")  # the same: nothing to overwrite
    assert result.exit_code == 0, result.stderr
    assert str(runs / "numbers" / "report.html") in result.stdout
    result = call("report", runs / "numbers", "--out", runs / "page.html", "-q")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (runs / "page.html").read_bytes() == page


def test_a_page_that_would_change_is_not_overwritten_without_force(runs):
    page = runs / "numbers" / "report.html"
    page.write_text("my notes")
    result = call("report", runs / "numbers")
    assert result.exit_code == 2 and "--force" in result.stderr and page.read_text() == "my notes"
    assert call("report", runs / "numbers", "--force").exit_code == 0
    assert "Warnings" in page.read_text() or "No warnings" in page.read_text()


def test_a_report_on_other_rows_has_their_lines_and_number(runs):
    path = write_csv(runs / "later.csv", number_rows(50, seed=9))
    result = call("report", runs / "numbers", "--data", path, "--out", runs / "later.html")
    assert result.exit_code == 0, result.stderr
    page = (runs / "later.html").read_text()
    assert "later.csv" in page and "50 rows that were not in the fit" in page


def test_machines_get_the_report_as_data(runs):
    found = json.loads(call("report", runs / "classes", "--json").stdout)
    assert found["sections"][0]["title"] == "What was fitted"
    assert found == json.loads((runs / "classes" / "report.json").read_text())


def test_a_run_without_a_report_says_what_is_missing(runs):
    (runs / "numbers" / "report.json").unlink()
    result = call("report", runs / "numbers")
    assert result.exit_code == 2 and "report.json is missing" in result.stderr


def test_a_report_that_was_altered_is_refused(runs):
    (runs / "numbers" / "report.json").write_text('{"title": 3}')
    result = call("report", runs / "numbers", "--force")
    assert result.exit_code == 2 and "cannot be read" in result.stderr and result.stderr.count("\n") == 1
