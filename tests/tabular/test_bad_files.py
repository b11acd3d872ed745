"""Kinds of bad file, as a user's day brings them: each gives one line with a cause and a way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import knowable as kn
from knowable.tabular import Schema, read_table

GOOD = [(f"{x:.2f}", "abc"[x % 3], f"{3 * x + 1}") for x in range(40)]


def csv(rows: list[tuple[str, ...]], header: str = "x,colour,y", delimiter: str = ",") -> bytes:
    return "\n".join([header, *(delimiter.join(row) for row in rows), ""]).encode()


def changed(row: int, column: int, value: str) -> bytes:
    rows = [list(each) for each in GOOD]
    rows[row][column] = value
    return csv([tuple(each) for each in rows])


def column_of(column: int, value: str) -> bytes:
    return csv([tuple(value if k == column else cell for k, cell in enumerate(row)) for row in GOOD])


def wide(columns: int) -> bytes:
    rng = np.random.default_rng(0)
    header = ",".join(["y", *(f"c{k}" for k in range(columns))])
    return (
        header + "\n" + "\n".join(",".join(f"{v:.2f}" for v in rng.normal(size=columns + 1)) for _ in range(5))
    ).encode()


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", r"data.csv is empty. It must have"),
    "only blank lines": (b"\n\n  \n", r"data.csv is empty"),
    "a header and no rows": (csv([]), r"has a header \(x, colour, y\) and no rows"),
    "no header": (b"1,2,3\n4,5,6\n", r"line 1 has numbers where the names .* Put a line with names on top"),
    "one column": (b"y\n1\n2\n3\n", r"has the target y and no other column"),
    "target missing": (csv(GOOD, "x,colour,z"), r"has no column 'y'. (Did you mean|Its columns are)"),
    "target constant": (column_of(2, "7"), r"target 'y' is 7 in every row: there is nothing to learn"),
    "target without values": (column_of(2, ""), r"target 'y' has no values"),
    "rows without a target": (changed(5, 2, "NA"), r"line 7, column 'y': the target is missing. Remove such rows"),
    "all missing": (csv([("", "", row[2]) for row in GOOD]), r"no column to learn from: none varies \('x': it has no"),
    "constant columns": (csv([("1", "a", row[2]) for row in GOOD]), r"none varies \('x': it is the same in every row"),
    "outlier in a column": (changed(9, 0, "1e9"), r"line 11, column 'x': 1e\+09 is .* times the usual spread"),
    "outlier in the target": (changed(9, 2, "1e9"), r"line 11, column 'y': 1e\+09 is .* times the usual spread"),
    "infinite value": (changed(3, 0, "inf"), r"line 5, column 'x' is infinite"),
    "mixed types": (changed(12, 0, "twelve"), r"line 14, column 'x': 'twelve' is not a number, and 9[78]% of the"),
    "text in the target": (changed(12, 2, "many"), r"line 14, column 'y': 'many' is not a number, and the target must"),
    "duplicate headers": (csv(GOOD, "x,x,y"), r"two columns of the name 'x' \(columns 1 and 2\)"),
    "a column without a name": (csv(GOOD, "x,,y"), r"column 2 has no name in the header"),
    "binary": (b"x,y\n1,\0\0\n", r"is not text: it has zero bytes"),
    "workbook": (b"PK\x03\x04" + bytes(50), r"is a workbook or an archive, not text. Save the sheet as CSV"),
    "ragged": (csv([*GOOD[:5], ("1", "a", "2", "9"), *GOOD[5:]]), r"line 7 has 4 fields, the header has 3"),
    "a row cut short": (csv([*GOOD[:5], ("1",)]), r"line 7 has 1 field, the header has 3"),
    "a quote that is never closed": (csv([*GOOD[:3], ("1", '"a', "2")]), r"line \d+: .* quote"),
    "one row": (csv(GOOD[:1]), r"has 1 sample: at least 2 rows are needed"),
    "one class": (column_of(2, "yes"), r"target has one class only \(yes\)"),
    "a class for every row": (csv([(*row[:2], f"id{k}") for k, row in enumerate(GOOD * 2)]), r"has 80 classes in 80"),
    "10,000 columns": (wide(10_000), r"has 10,000 columns; at most 5,000 can be used. Choose some"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_gives_one_line_with_its_cause_and_a_way_out(kind: str, tmp_path: Path):
    content, words = BAD[kind]
    (tmp_path / "data.csv").write_bytes(content)
    with pytest.raises(kn.InvalidData, match=words) as caught:
        Schema.learn(read_table(tmp_path / "data.csv"), "y")
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300


def test_there_are_more_than_twenty_kinds():
    assert len(BAD) >= 20


def test_the_good_file_is_good(tmp_path: Path):
    (tmp_path / "data.csv").write_bytes(csv(GOOD))
    assert Schema.learn(read_table(tmp_path / "data.csv"), "y").task == "regression"


def test_semicolons_are_no_fault(tmp_path: Path):
    (tmp_path / "data.csv").write_bytes(csv(GOOD, "x;colour;y", ";"))
    assert Schema.learn(read_table(tmp_path / "data.csv"), "y").feature_names[0] == "x"


def test_a_file_that_is_not_there_and_a_folder_are_named(tmp_path: Path):
    with pytest.raises(kn.InvalidData, match="There is no file"):
        read_table(tmp_path / "no.csv")
    with pytest.raises(kn.InvalidData, match="is a folder"):
        read_table(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda content: content[: len(content) // 2], "ends before its footer: it was cut short"),
        (lambda content: b"x,y\n1,2\n", "is not a Parquet file"),
        (lambda content: b"", "is empty"),
    ],
    ids=["truncated", "another format", "empty"],
)
def test_a_bad_parquet_file_is_told_before_it_is_read(damage: Callable[[bytes], bytes], words: str, tmp_path: Path):
    (tmp_path / "data.parquet").write_bytes(damage(b"PAR1" + bytes(1000) + b"PAR1"))
    with pytest.raises(kn.InvalidData, match=words):
        read_table(tmp_path / "data.parquet")


def test_a_parquet_file_with_damage_inside_is_told(tmp_path: Path):
    pytest.importorskip("pyarrow")
    (tmp_path / "data.parquet").write_bytes(b"PAR1" + bytes(1000) + b"PAR1")
    with pytest.raises(kn.InvalidData, match="damaged Parquet file"):
        read_table(tmp_path / "data.parquet")


def test_a_category_that_was_not_in_training_is_named(tmp_path: Path):
    (tmp_path / "data.csv").write_bytes(csv(GOOD))
    (tmp_path / "new.csv").write_bytes(csv([("1.0", "violet", "2")]))
    schema = Schema.learn(read_table(tmp_path / "data.csv"), "y")
    with pytest.warns(kn.KnowableWarning, match=r"Column 'colour' has categories .*'violet'"):
        schema.encode(read_table(tmp_path / "new.csv"))
