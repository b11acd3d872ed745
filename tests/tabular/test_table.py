"""Tests of what a table says of itself."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import knowable as kn
from knowable.tabular.table import Table, as_table, listed


def table(lines: list[int] | None = None) -> Table:
    return Table(pd.DataFrame({"age": [30, 40, 50], "name": ["a", "b", "c"]}), "people.csv", lines)


def test_it_knows_its_columns_and_rows():
    assert table().names == ("age", "name")
    assert len(table()) == 3
    assert table().column("age").tolist() == [30, 40, 50]


def test_a_column_that_is_not_there_is_named_with_the_nearest():
    with pytest.raises(kn.InvalidData, match=r"people.csv has no column 'agee'. Did you mean 'age'\?"):
        table().find("agee")
    with pytest.raises(kn.InvalidData, match="Its columns are age, name"):
        table().find("zzz")


def test_places_are_lines_of_a_file_or_rows_of_a_table():
    assert table([2, 3, 5]).where(2, "age") == "people.csv, line 5, column 'age'"
    assert table([2, 3, 5]).where(0) == "people.csv, line 2"
    assert as_table(table().frame).where(2, "age") == "row 2 (counting from 0), column 'age'"


def test_chosen_rows_keep_their_lines():
    chosen = table([2, 3, 5]).rows([2, 0, 2])
    assert chosen.column("name").tolist() == ["c", "a", "c"]
    assert chosen.where(0) == "people.csv, line 5"
    masked = table([2, 3, 5]).rows(np.array([False, True, True]))
    assert masked.where(0) == "people.csv, line 3"


def test_columns_can_be_left_out():
    assert table().without(["age"]).names == ("name",)
    with pytest.raises(kn.InvalidData, match="no column 'x'"):
        table().without(["x"])


def test_names_become_text_and_must_differ():
    assert as_table(pd.DataFrame([[1, 2]], columns=[0, "b"])).names == ("0", "b")
    with pytest.raises(kn.InvalidData, match="two columns of the name '1'"):
        as_table(pd.DataFrame([[1, 2]], columns=[1, "1"]))


def test_names_of_several_levels_are_refused():
    frame = pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "x"), ("a", "y")]))
    with pytest.raises(kn.InvalidArgument, match="several levels"):
        as_table(frame)


def test_objects_that_are_numbers_become_numbers():
    assert as_table(pd.DataFrame({"a": np.array([1.5, 2.5], dtype=object)})).column("a").dtype == float


def test_long_lists_of_names_are_cut():
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(20)) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_a_table_shows_what_it_is():
    assert repr(table()) == "Table('people.csv', rows=3, columns=age, name)"
