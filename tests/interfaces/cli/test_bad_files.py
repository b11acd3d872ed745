"""Two dozen kinds of bad file: each gives one line with cause and way out, exit code 2, and nothing is written."""

import random

import pytest

from knowable.tabular import read_table
from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import number_rows, read_csv, write_csv


def text(rows=40):
    """A good file."""
    draw = random.Random(0)
    return "a,b,y\n" + "".join(
        f"{draw.gauss(0, 1):.3f},{draw.choice('pqr')},{draw.gauss(0, 1):.3f}\n" for _ in range(rows)
    )


def cell(line, column, value):
    """The good file with one cell changed; the header is line 1."""
    lines = text().splitlines()
    fields = lines[line - 1].split(",")
    fields["aby".index(column)] = value
    lines[line - 1] = ",".join(fields)
    return "\n".join(lines) + "\n"


def column(name, values):
    """The good file with a column replaced."""
    lines = [line.split(",") for line in text().splitlines()]
    place = "aby".index(name)
    for line, value in zip(lines[1:], values, strict=True):
        line[place] = value
    return "\n".join(",".join(line) for line in lines) + "\n"


def wide(columns):
    names = [f"c{i}" for i in range(columns)]
    rows = [",".join(str((i * j) % 7) for j in range(columns)) + f",{i}.5" for i in range(12)]
    return ",".join([*names, "y"]) + "\n" + "\n".join(rows) + "\n"


# name: (content, a word of the cause, words of the way out)
BAD = {
    "empty": ("", "empty", "names of the columns"),
    "blank lines only": ("\n\n  \n", "empty", "names of the columns"),
    "header only": ("a,b,y\n", "no rows", ""),
    "one column": ("y\n" + "".join(f"{i}.5\n" for i in range(30)), "no other column", ""),
    "one row": ("a,b,y\n1,p,2\n", "", ""),
    "target not there": (text().replace("a,b,y", "a,b,z", 1), "no column 'y'", "z"),
    "target constant": (column("y", ["3"] * 40), "every row", "right column"),
    "target all missing": (column("y", [""] * 40), "no values", "right column"),
    "target with gaps": (cell(17, "y", ""), "line 17, column 'y'", "Remove such rows"),
    "target mixed": (cell(9, "y", "high"), "line 9, column 'y'", "Correct it"),
    "a target of 1e9": (cell(21, "y", "1e9"), "line 21, column 'y'", "--kind y=numeric"),
    "target infinite": (cell(9, "y", "inf"), "line 9, column 'y'", "Correct it"),
    "inputs all missing": (
        "a,b,y\n" + "".join(f",,{i % 7}.5\n" for i in range(30)), "no column to learn from", "Check"
    ),
    "inputs constant": ("a,b,y\n" + "".join(f"1,p,{i % 7}.5\n" for i in range(30)), "none varies", "Check"),
    "an outlier of 1e9": (cell(21, "a", "1e9"), "line 21, column 'a'", "--kind a=numeric"),
    "mixed types": (cell(12, "a", "tall"), "line 12, column 'a'", "--kind a=categorical"),
    "an infinite input": (cell(12, "a", "-inf"), "line 12, column 'a'", "Correct it"),
    "duplicate headers": (text().replace("a,b,y", "a,a,y", 1), "two columns of the name 'a'", "Rename"),
    "a header without a name": (text().replace("a,b,y", "a,,y", 1), "no name", "Give it one"),
    "no header": (text().split("\n", 1)[1].translate(str.maketrans("pqr", "123")), "numbers where", "names"),
    "ragged rows": (cell(17, "b", "p,q"), "line 17 has 4 fields, the header has 3", "quotes"),
    "a quote never closed": (cell(30, "b", '"p'), "line", "quote"),
    "zero bytes": (text().encode().replace(b"p", b"\0", 1), "zero bytes", "Save it as CSV"),
    "a workbook": (b"PK\x03\x04" + b"\0" * 60, "workbook", "Save the sheet as CSV"),
    "10,000 columns": (wide(10_000), "10,000 columns", "Choose some"),
    "semicolons but another target": (text().replace(",", ";").replace("a;b;y", "a;b;z", 1), "no column 'y'", "z"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_says_the_cause_and_a_way_out_on_one_line_and_writes_nothing(kind, tmp_path):
    content, cause, way_out = BAD[kind]
    path = tmp_path / "bad.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = call("fit", path, "--target", "y", "--out", tmp_path / "run", "--method", "map", "--budget", "quick")
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr)
    assert result.stdout == "" and result.stderr.startswith("knowable: ") and result.stderr.count("\n") == 1
    assert cause in result.stderr and way_out in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr) < 500
    assert [each.name for each in tmp_path.iterdir()] == ["bad.csv"]


def test_the_good_file_that_the_bad_ones_are_made_of_is_good_with_commas_and_with_semicolons(tmp_path):
    tables = []
    for name, content in (("a.csv", text()), ("b.csv", text().replace(",", ";")), ("c.csv", text().replace(",", "\t"))):
        (tmp_path / name).write_text(content)
        table = read_table(tmp_path / name)
        tables.append({name: table.column(name).tolist() for name in table.names})
    assert tables[0] == tables[1] == tables[2]
    result = call(
        "fit",
        tmp_path / "a.csv",
        "-t",
        "y",
        "-o",
        tmp_path / "run",
        "-m",
        "map",
        "--budget",
        "quick",
        "-q",
        "--no-refit",
    )
    assert result.exit_code in (0, 3), result.stderr


@pytest.mark.parametrize("content", [b"", b"PAR1 cut short", b"not at all", b"PAR1" + b"\0" * 40 + b"PAR1"])
def test_a_damaged_parquet_file_is_refused(content, tmp_path):
    path = tmp_path / "bad.parquet"
    path.write_bytes(content)
    result = call("fit", path, "--target", "y", "--out", tmp_path / "run")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "bad.parquet" in result.stderr or "pyarrow" in result.stderr  # where that is not installed
    assert [each.name for each in tmp_path.iterdir()] == ["bad.parquet"]


def test_a_folder_or_nothing_in_place_of_a_file_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "nothing.csv"):
        result = call("fit", place, "--target", "y", "--out", tmp_path / "run")
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unseen_category_at_prediction_is_a_warning_with_its_lines(runs):
    rows = [{**row, "site": "moon"} if i == 3 else row for i, row in enumerate(number_rows(10, seed=1))]
    path = write_csv(runs / "new.csv", rows)
    result = call("predict", runs / "numbers", path, "--out", runs / "pred.csv")
    assert result.exit_code == 0 and len(read_csv(runs / "pred.csv")) == 10
    assert "'site'" in result.stderr and "'moon' (1 row: line 5)" in result.stderr


def test_other_units_at_prediction_are_noticed(runs):
    rows = [{**row, "dose": f"{1000 * float(row['dose'] or 1):.1f}"} for row in read_csv(runs / "numbers.csv")]
    result = call("predict", runs / "numbers", write_csv(runs / "milli.csv", rows))
    assert result.exit_code == 2 and "'dose'" in result.stderr and "other units" in result.stderr


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_without_a_target_the_columns_are_named(command, tmp_path):
    (tmp_path / "data.csv").write_text(text(), encoding="utf-8")
    result = call(command, tmp_path / "data.csv", "--out", tmp_path / "run")
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "--target is missing" in result.stderr and "data.csv are a, b, y" in result.stderr
