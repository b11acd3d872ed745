"""Tests of what columns are taken to be, and of what all kinds have in common."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest

import knowable as kn
from knowable.tabular import read_table
from knowable.tabular.columns import Column, as_numbers, find_missing, infer_kind, label_of, learn_column
from knowable.tabular.label_columns import BooleanColumn, CategoricalColumn, OrdinalColumn
from knowable.tabular.number_columns import NumericColumn

LEVELS = pd.Categorical(["low", "high", "low"], categories=["low", "high"], ordered=True)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, 2, 3], "numeric"),
        ([1.5, None, 3.0], "numeric"),
        (["1", "2.5", None], "numeric"),
        ([True, False, True], "boolean"),
        ([True, None, False], "boolean"),
        (["yes", "no", "yes"], "boolean"),
        (["F", "T", None], "boolean"),
        (["yes", "y", "yes"], "categorical"),  # two ways to say the same
        (["red", "blue", "red"], "categorical"),
        (pd.Categorical(["1", "2", "1"]), "categorical"),
        (LEVELS, "ordinal"),
        (["2024-01-01", "2024-02-01", None], "date"),
        (["2024-01-01 10:30", "2024-02-01T11:00:05Z", None], "date"),
        (pd.to_datetime(["2024-01-01", "2024-02-01", None]), "date"),
        (["a", "b", "c"], "categorical"),
    ],
    ids=str,
)
def test_the_kind_of_a_column_is_told_from_its_values(values: Any, kind: str):
    assert infer_kind(read_table(pd.DataFrame({"c": values})), "c") == kind


def test_a_text_that_differs_in_nearly_every_row_only_names_the_rows():
    table = read_table({"id": [f"row {k}" for k in range(30)], "few": ["a", "b"] * 15})
    assert learn_column(table, "id") == "it has another text in nearly every row (--id carries it into predictions)"
    assert isinstance(learn_column(table, "few"), CategoricalColumn)
    assert isinstance(learn_column(table, "id", "categorical"), CategoricalColumn)


def test_a_slip_among_numbers_is_named_unless_the_kind_is_given():
    table = read_table({"age": ["1", "2", "3", "4", "x"] * 4})
    with pytest.raises(kn.InvalidData, match=r"row 4 .*, column 'age': 'x' is not a number, and 80% of the column are"):
        learn_column(table, "age")
    assert isinstance(learn_column(table, "age", "categorical"), CategoricalColumn)


@pytest.mark.parametrize(
    ("given", "cls"),
    [
        ("numeric", NumericColumn),
        ("categorical", CategoricalColumn),
        ("ordinal", OrdinalColumn),
        ([1, 0], OrdinalColumn),
        ("boolean", BooleanColumn),
    ],
)
def test_the_kind_can_be_given(given: Any, cls: type[Column]):
    assert type(learn_column(read_table({"c": [1, 0, 1]}), "c", given)) is cls


@pytest.mark.parametrize("given", ["number", 3, [], ["one"]])
def test_a_kind_that_is_none_is_refused(given: Any):
    with pytest.raises(kn.InvalidArgument, match=r"kinds\['c'\] must be one of 'numeric'"):
        learn_column(read_table({"c": [1, 0, 1]}), "c", given)


@pytest.mark.parametrize(
    ("values", "given", "why"),
    [
        ([7, 7, 7], None, "it is the same in every row"),
        (["a", "a", "a"], None, "it is the same in every row"),
        ([True, True, True], None, "it is the same in every row"),
        (["2024-01-01"] * 3, None, "it is the same in every row"),
        ([0.1 + 0.2, 0.3, 0.3], None, "it is the same in every row"),  # up to rounding
        ([None, None, None], None, "it has no values"),
        (["", "NA", "?"], None, "it has no values"),
        ([1, 2, 3], "ignore", "it is to be ignored"),
    ],
)
def test_columns_that_tell_nothing_are_left_out(values: Any, given: Any, why: str):
    assert learn_column(read_table({"c": values}), "c", given) == why


def test_gaps_tell_rows_of_a_constant_column_apart():
    column = learn_column(read_table({"c": [7.0, None, 7.0]}), "c")
    assert isinstance(column, NumericColumn)
    assert column.encode(read_table({"c": [7.0, None]})).tolist() == [[0.0, 0.0], [0.0, 1.0]]


COLUMNS = {
    "numeric": [1.0, 5.0, None, 2.0],
    "heavy": [0.0] * 200 + [1e3, None],
    "categorical": ["a", "b", "a", None],
    "ordinal": pd.Categorical(["low", "high", None, "low"], categories=["low", "high"], ordered=True),
    "boolean": [True, False, None, True],
    "date": ["2020-01-01 12:00", "2024-02-29 13:00", None, "2022-06-01 00:00"],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_every_kind_goes_to_json_and_back(name: str):
    table = read_table(pd.DataFrame({"c": COLUMNS[name]}))
    column = learn_column(table, "c")
    assert isinstance(column, Column)
    back = Column.from_json(json.loads(json.dumps(column.to_json())))
    assert back == column
    np.testing.assert_array_equal(back.encode(table), column.encode(table))


@pytest.mark.parametrize("name", COLUMNS)
def test_every_kind_says_how_many_numbers_it_gives_and_gives_finite_ones(name: str):
    table = read_table(pd.DataFrame({"c": COLUMNS[name]}))
    column = learn_column(table, "c")
    assert isinstance(column, Column)
    found = column.encode(table)
    assert found.shape == (len(table), len(column.features))
    assert np.isfinite(found).all()
    assert column.features[-1] == "c is missing"
    np.testing.assert_array_equal(found[:, -1], find_missing(table.column("c")))


@pytest.mark.parametrize("name", COLUMNS)
def test_gaps_that_training_did_not_have_are_filled_with_a_warning(name: str):
    frame = pd.DataFrame({"c": COLUMNS[name]})
    column = learn_column(read_table(frame.dropna()), "c")
    assert isinstance(column, Column) and not column.gaps
    with pytest.warns(kn.KnowableWarning, match="Column 'c' has 1 missing value, and had none in training"):
        found = column.encode(read_table(frame))
    assert np.isfinite(found).all() and found.shape[1] == len(column.features)


def test_encoding_the_training_rows_warns_of_nothing():
    frame = pd.DataFrame({"c": COLUMNS["categorical"]})
    column = learn_column(read_table(frame), "c")
    assert isinstance(column, Column)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        column.encode(read_table(frame))


def test_a_damaged_column_is_told():
    with pytest.raises(kn.DamagedArtifact, match="column that cannot be read"):
        Column.from_json({"kind": "colour", "name": "c"})
    with pytest.raises(kn.DamagedArtifact, match="column that cannot be read"):
        Column.from_json({"kind": "boolean", "name": "c", "gaps": False})


def test_numbers_come_from_texts_and_gaps_are_kept():
    found = as_numbers(read_table({"c": ["1", " 2.5", "", "NA"]}), "c")
    np.testing.assert_array_equal(found, [1.0, 2.5, np.nan, np.nan])
    with pytest.raises(kn.InvalidData, match=r"row 1 .* 'x' is not a number"):
        as_numbers(read_table({"c": ["1", "x"]}), "c")


@pytest.mark.parametrize(
    ("value", "label"), [(3, "3"), (3.0, "3"), (np.float64(3.0), "3"), (3.5, "3.5"), (" a ", "a"), (True, "True")]
)
def test_a_category_has_one_name_however_it_was_read(value: Any, label: str):
    assert label_of(value) == label
