"""Tests of weights on rows and of an order that does not depend on the order rows came in."""

from __future__ import annotations

import numpy as np
import pytest

import knowable as kn
from knowable.tabular import read_table
from knowable.tabular.rows import canonical_order, checked_weights, weighed

TABLE = read_table({"x": [1.0, 2.0, 3.0], "s": ["a", None, "c"]})
Y = np.array([10.0, 20.0, 30.0])


def test_whole_weights_are_rows_repeated():
    table, y, weights = weighed(TABLE, Y, np.array([2.0, 0.0, 1.0]))
    assert weights is None
    assert y.tolist() == [10.0, 10.0, 30.0]
    assert table.column("x").tolist() == [1.0, 1.0, 3.0]


def test_other_weights_stay_and_rows_without_weight_go():
    table, y, weights = weighed(TABLE, Y, np.array([0.5, 0.0, 1.0]))
    assert weights is not None and weights.tolist() == [0.5, 1.0]
    assert y.tolist() == [10.0, 30.0] and len(table) == 2


def test_whole_weights_that_are_very_large_are_not_repeated():
    _, y, weights = weighed(TABLE, Y, np.array([1e9, 1.0, 1.0]))
    assert weights is not None and len(y) == 3


def test_without_weights_rows_stay_as_they_are():
    assert weighed(TABLE, Y, None) == (TABLE, Y, None)
    assert checked_weights(None, 3) is None


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, 2.0], "one number for each of 3 rows"),
        (np.ones((3, 2)), "one number for each of 3 rows"),
        ([1.0, -1.0, 1.0], "0 or above"),
        ([1.0, np.nan, 1.0], "finite"),
        ([0.0, 0.0, 0.0], "at least one weight that is not zero"),
        (["a", "b", "c"], "must be numbers"),
    ],
)
def test_wrong_weights_are_named(weights, words: str):
    with pytest.raises(kn.InvalidArgument, match=words):
        checked_weights(weights, 3)


def test_the_same_rows_in_another_order_come_out_in_the_same_order(seed: int):
    rng = np.random.default_rng(seed)
    columns = {
        "x": rng.integers(0, 3, 50).astype(float), "s": rng.choice(["a", "b", ""], 50), "b": rng.random(50) < 0.5,
    }  # fmt: skip
    y = rng.integers(0, 2, 50).astype(float)
    shuffle = rng.permutation(50)
    first, second = read_table(columns), read_table({name: each[shuffle] for name, each in columns.items()})
    a, b = canonical_order(first, y), canonical_order(second, y[shuffle])
    assert sorted(a) == list(range(50))
    assert first.rows(a).frame.equals(second.rows(b).frame)
    assert (y[a] == y[shuffle][b]).all()


def test_the_order_heeds_targets_and_weights(seed: int):
    rng = np.random.default_rng(seed)
    table = read_table({"x": np.zeros(30)})
    values, shuffle = rng.random(30), rng.permutation(30)
    for arguments in ((values,), (np.zeros(30), values)):
        a = canonical_order(table, *arguments)
        b = canonical_order(table, *(each[shuffle] for each in arguments))
        assert (values[a] == values[shuffle][b]).all()


def test_whole_numbers_and_numbers_are_ordered_alike():
    whole, other = read_table({"x": [3, 1, 2]}), read_table({"x": [3.0, 1.0, 2.0]})
    assert canonical_order(whole, Y).tolist() == canonical_order(other, Y).tolist()
