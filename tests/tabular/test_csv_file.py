"""Tests of reading comma-separated files: what becomes of values, and where errors are."""

from __future__ import annotations

import csv
import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import knowable as kn
from knowable.tabular.csv_file import find_delimiter, parse_number, read_csv


def read(text: str):
    return read_csv(text.encode(), "data.csv")


def test_numbers_whole_numbers_and_texts_are_told_apart():
    table = read("a,b,c\n1,1.5,x\n2,,y\n")
    assert table.names == ("a", "b", "c")
    assert table.column("a").dtype.kind == "i"
    assert table.column("b").tolist()[0] == 1.5 and math.isnan(table.column("b")[1])
    assert list(table.column("c")) == ["x", "y"]


@pytest.mark.parametrize("gap", ["", "NA", "n/a", "NaN", "null", "None", "?", " "])
def test_gaps_are_known_in_all_their_forms(gap: str):
    table = read(f"a,b\n1,x\n{gap},y\n3,{gap}\n")
    assert table.column("a").isna().tolist() == [False, True, False]
    assert table.column("b").isna().tolist() == [False, False, True]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_what_separates_fields_is_told_from_the_header(delimiter: str):
    text = f'"a{delimiter}1"{delimiter}b{delimiter}c\n1{delimiter}2{delimiter}3\n'
    assert find_delimiter(text) == delimiter
    assert read(text).names == (f"a{delimiter}1", "b", "c")


def test_decimal_commas_go_with_semicolons():
    assert read("a;b\n1,5;2\n2,5;3\n").column("a").tolist() == [1.5, 2.5]


def test_rows_know_their_lines_also_after_blank_ones_and_texts_of_several_lines():
    table = read('a,b\n\n1,"two\nlines"\n\n2,y\n')
    assert table.where(0) == "data.csv, line 4"  # where it ends
    assert table.where(1) == "data.csv, line 6"
    assert table.column("b")[0] == "two\nlines"


def test_a_first_column_without_a_name_that_counts_the_rows_is_left_out():
    assert read(",a\n0,5\n1,6\n").names == ("a",)
    assert read(",a\n1,5\n2,6\n").names == ("a",)
    with pytest.raises(kn.InvalidData, match="column 1 has no name"):
        read(",a\n7,5\n9,6\n")


def test_a_mark_of_the_order_of_bytes_is_no_part_of_the_first_name():
    assert read_csv(b"\xef\xbb\xbfa,b\n1,2\n", "data.csv").names == ("a", "b")
    assert read_csv("a,b\n1,2\n".encode("utf-16"), "data.csv").names == ("a", "b")


def test_windows_lines_are_read_alike():
    assert read("a,b\r\n1,2\r\n").column("b").tolist() == [2]


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1.0), (" -2.5e3 ", -2500.0), (".5", 0.5), ("5.", 5.0), ("+1", 1.0), ("inf", math.inf)],
)
def test_texts_that_are_numbers(text: str, number: float):
    assert parse_number(text) == number


@pytest.mark.parametrize("text", ["", "abc", "1_000", "1,5", "0x10", "1 2", "e5", "--1", "."])
def test_texts_that_are_not(text: str):
    assert parse_number(text) is None


def test_a_column_with_underscores_stays_text():
    assert list(read("a,b\n1_000,1\n2_000,2\n").column("a")) == ["1_000", "2_000"]


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=("Cs",)), max_size=8)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=6))
def test_texts_come_back_as_they_were_written(rows: list[tuple[str, str]]):
    """Whatever Python's writer writes; a letter before and after each keeps it text and its spaces."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(["first", "second"])
    writer.writerows([(f"a{a}a", f"b{b}b") for a, b in rows])
    table = read_csv(stream.getvalue().encode(), "data.csv")
    assert list(table.column("first")) == [f"a{a}a" for a, _ in rows]
    assert list(table.column("second")) == [f"b{b}b" for _, b in rows]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=10))
def test_numbers_come_back_to_the_last_bit(values: list[float]):
    text = "a\n" + "\n".join(map(repr, values)) + "\n"
    assert read(text).column("a").tolist() == values
