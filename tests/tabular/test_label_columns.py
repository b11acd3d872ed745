"""Tests of columns of categories, levels, and yes and no."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import knowable as kn
from knowable.tabular import label_columns, read_table
from knowable.tabular.label_columns import BooleanColumn, CategoricalColumn, OrdinalColumn


def categorical(values) -> CategoricalColumn:
    return CategoricalColumn.learn(read_table({"c": values}), "c")


def test_each_category_has_its_place_and_all_others_one():
    column = categorical(["b", "a", "b"])
    assert column.features == ("c = a", "c = b", "c = other")
    assert column.encode(read_table({"c": ["a", "b"]})).tolist() == [[1, 0, 0], [0, 1, 0]]


def test_an_unseen_category_goes_to_the_others_with_a_warning_that_names_it():
    column = categorical(["b", "a", "b"])
    with pytest.warns(kn.KnowableWarning, match=r"Column 'c' has categories that were not .*: 'z' \(1 row: row 0\)"):
        assert column.encode(read_table({"c": ["z"]})).tolist() == [[0, 0, 1]]


def test_what_is_missing_becomes_the_most_frequent_category():
    column = categorical(["b", "a", "b", None])
    assert column.encode(read_table({"c": [None, "a"]})).tolist() == [[0, 1, 0, 1], [1, 0, 0, 0]]


def test_where_two_are_as_frequent_the_first_in_the_alphabet_is_the_usual_one():
    assert categorical(["b", "a"]).usual == categorical(["a", "b"]).usual == "a"


def test_numbers_as_categories_are_the_same_with_and_without_a_gap_beside_them():
    column = categorical([1, 2, 2])
    found = column.encode(read_table({"c": [1.0, 2.0]}))
    assert found.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_the_rarest_of_very_many_categories_share_a_place(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(label_columns, "_MOST", 2)
    column = categorical(["a", "a", "b", "b", "c", "d"])
    assert (column.categories, column.rare) == (("a", "b"), 2)
    assert column.encode(read_table({"c": ["c", "a"]})).tolist() == [[0, 0, 1], [1, 0, 0]]


# --- levels ----------------------------------------------------------------------------------------------------------


def test_levels_are_numbered_in_the_order_given():
    values = ["S", "L", "M", "S"]
    column = OrdinalColumn.learn(read_table({"c": values}), "c", ["S", "M", "L"])
    ranks = np.array([0.0, 2.0, 1.0, 0.0])
    expected = (ranks - ranks.mean()) / ranks.std()
    np.testing.assert_allclose(column.encode(read_table({"c": values}))[:, 0], expected)


def test_the_order_comes_from_the_data_frame_or_from_numbers():
    levels = pd.Categorical(["low", "high"], categories=["low", "high"], ordered=True)
    assert OrdinalColumn.learn(read_table(pd.DataFrame({"c": levels})), "c").levels == ("low", "high")
    assert OrdinalColumn.learn(read_table({"c": [10, 2, 2]}), "c", "ordinal").levels == ("2", "10")
    with pytest.raises(kn.InvalidArgument, match="needs their order: give a list, lowest first"):
        OrdinalColumn.learn(read_table({"c": ["a", "b"]}), "c", "ordinal")


def test_a_level_that_is_not_in_the_list_is_named():
    with pytest.raises(kn.InvalidData, match=r"row 1 .*'XL' is not one of its levels \(S, M\)"):
        OrdinalColumn.learn(read_table({"c": ["S", "XL"]}), "c", ["S", "M"])
    with pytest.raises(kn.InvalidArgument, match="name every level once"):
        OrdinalColumn.learn(read_table({"c": ["S", "M"]}), "c", ["S", "M", "S"])


def test_an_unseen_level_becomes_the_middle_one():
    column = OrdinalColumn.learn(read_table({"c": ["S", "M", "L"]}), "c", ["S", "M", "L"])
    with pytest.warns(kn.KnowableWarning, match=r"'XL' \(1 row: row 0\)"):
        found = column.encode(read_table({"c": ["XL", "M"]}))
    assert found[0, 0] == found[1, 0]


# --- yes and no ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [[True, False, True, True], ["yes", "No", "YES", "y"], [1, 0, 1.0, 1], ["T", "f", "t", "true"]]
)
def test_all_ways_to_say_yes_give_the_same(values):
    column = BooleanColumn.learn(read_table({"c": values}), "c")
    truth = np.array([1.0, 0.0, 1.0, 1.0])
    np.testing.assert_allclose(column.encode(read_table({"c": values}))[:, 0], (truth - truth.mean()) / truth.std())


def test_what_is_neither_yes_nor_no_is_named():
    column = BooleanColumn.learn(read_table({"c": ["yes", "no"]}), "c")
    with pytest.raises(kn.InvalidData, match=r"row 1 .*'maybe' is neither yes nor no"):
        column.check(read_table({"c": ["yes", "maybe"]}))


def test_what_is_missing_becomes_the_more_frequent_one():
    column = BooleanColumn.learn(read_table({"c": [True, True, False, None]}), "c")
    found = column.encode(read_table({"c": [None, True, False]}))
    assert found[0, 0] == found[1, 0] != found[2, 0]


def test_guesses_have_the_known_categories_as_often_as_in_training():
    column = categorical(["a", "b", "b", "b"])
    found = column.guesses(read_table({"c": ["z", "a"]}), 8)
    assert sum(each[0].tolist() == [1, 0, 0] for each in found) == 2  # a quarter of 8
    assert sum(each[0].tolist() == [0, 1, 0] for each in found) == 6
    assert all(each[1].tolist() == [1, 0, 0] for each in found)  # a known one stays
    assert column.guesses(read_table({"c": ["a"]}), 8) == []
    levels = OrdinalColumn.learn(read_table({"c": ["S", "M", "L", "L"]}), "c", ["S", "M", "L"])
    ranks = [each[0, 0] * levels.scale + levels.centre for each in levels.guesses(read_table({"c": ["XL"]}), 4)]
    np.testing.assert_allclose(ranks, [0, 1, 2, 2], atol=1e-12)
