"""``knowable compare``: methods side by side on a file."""

import csv
import json

import pytest

from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import number_rows, write_csv

QUICK = ("--target", "response", "--methods", "map,laplace", "--cv", "2", "--budget", "60")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    path = write_csv(folder / "n.csv", number_rows(60))
    return folder, path, call("compare", path, *QUICK, "--out", folder / "out")


def test_the_ranking_is_printed_and_written_with_standard_errors(compared):
    folder, _, result = compared
    assert result.exit_code in (0, 3), result.stderr
    for word in ("map", "laplace", "nll", "±"):
        assert word in result.stdout
    names = sorted(each.name for each in (folder / "out").iterdir())
    assert names == ["comparison.csv", "comparison.html", "comparison.json", "comparison.jsonl"]
    with (folder / "out" / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {"map", "laplace"} and all(row["nll_se"] for row in rows)
    page = (folder / "out" / "comparison.html").read_text()
    assert "laplace" in page and 'src="http' not in page


def test_the_same_command_goes_on_and_ends_with_the_same_scores(compared):
    folder, path, _ = compared
    first = json.loads((folder / "out" / "comparison.json").read_text())
    again = call("compare", path, *QUICK, "--out", folder / "out", "--json")
    found = json.loads(again.stdout)
    assert [row["nll"] for row in found["table"]] == [row["nll"] for row in first["table"]]


def test_another_comparison_does_not_go_into_the_same_folder_without_force(compared):
    folder, path, _ = compared
    result = call("compare", path, *QUICK, "--seed", "4", "--out", folder / "out")
    assert result.exit_code == 2 and result.stderr.count("\n") >= 1


def test_a_folder_with_something_else_in_it_is_left_alone(compared, tmp_path):
    _, path, _ = compared
    (tmp_path / "thesis.tex").write_text("mine")
    result = call("compare", path, *QUICK, "--out", tmp_path)
    assert result.exit_code == 2 and "thesis.tex" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "map,laplas"], "Did you mean 'laplace'?"),
        (["--methods", " , "], "is empty"),
        (["--cv", "1"], "cv must be"),
        (["--budget", "-3"], "budget must be"),
    ],
)
def test_a_bad_option_is_one_line_and_code_2_and_nothing_is_written(options, message, tmp_path):
    path = write_csv(tmp_path / "n.csv", number_rows(20))
    result = call("compare", path, "--target", "response", "--out", tmp_path / "out", *options)
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["n.csv"]
