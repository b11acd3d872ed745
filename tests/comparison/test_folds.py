"""Every row is held out once, classes are shared out evenly, and wrong folds are refused by number."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import LeaveOneOut, ShuffleSplit

from knowable.comparison.folds import as_splits, splits_fingerprint
from knowable.errors import InvalidArgument, InvalidData, InvalidType


@given(st.integers(2, 40), st.data())
def test_every_row_is_held_out_exactly_once_and_folds_are_even(rows, data):
    count = data.draw(st.integers(2, rows))
    splits = as_splits(count, rows, np.arange(rows) * 0.1, seed=3)
    assert len(splits) == count
    assert sorted(np.concatenate([split.test for split in splits])) == list(range(rows))
    sizes = [len(split.test) for split in splits]
    assert max(sizes) - min(sizes) <= 1
    for split in splits:
        assert sorted([*split.train, *split.test]) == list(range(rows))


@pytest.mark.parametrize("labels", [["a", "b", "b"], [0, 1, 1], [[0], [1], [1]]])
def test_classes_have_the_same_share_in_every_fold(labels):
    y = np.array(labels * 10)
    for split in as_splits(5, 30, y, seed=0):
        first = (y.reshape(-1)[split.test] == y.reshape(-1)[0]).sum()
        assert first == 2 and len(split.test) == 6


def test_rare_classes_mixed_kinds_and_several_outcomes_are_dealt_like_numbers():
    for y in (np.array([0] * 29 + [1]), np.array([None, "a", 1.0] * 10, dtype=object), np.zeros((30, 2))):
        assert [len(split.test) for split in as_splits(3, 30, y, seed=0)] == [10, 10, 10]


def test_the_seed_fixes_the_folds():
    y = np.arange(30.0)
    prints = [splits_fingerprint(as_splits(3, 30, y, seed=seed)) for seed in (0, 0, 1)]
    assert prints[0] == prints[1] != prints[2]


def test_cross_validators_of_scikit_learn_are_taken():
    assert len(as_splits(LeaveOneOut(), 5, np.arange(5), seed=0)) == 5
    (split,) = as_splits(ShuffleSplit(n_splits=1, test_size=0.4, random_state=0), 10, np.arange(10), seed=0)
    assert len(split.test) == 4


def test_positions_and_masks_are_the_same_thing():
    mask = np.array([True, False, True, False])
    (by_mask,) = as_splits([(~mask, mask)], 4, np.zeros(4), seed=0)
    (by_place,) = as_splits([([1, 3], [0, 2])], 4, np.zeros(4), seed=0)
    assert splits_fingerprint([by_mask]) == splits_fingerprint([by_place])


@pytest.mark.parametrize(
    ("cv", "error", "words"),
    [
        (1, InvalidArgument, "cv must be a whole number >= 2"),
        (9, InvalidArgument, "at most the number of rows, 8"),
        (True, InvalidType, "number of folds"),
        ("five", InvalidType, "number of folds"),
        ([], InvalidArgument, "no folds"),
        ([3], InvalidType, "its number 0 is a int"),
        ([([0, 1], [1, 2])], InvalidArgument, "both learned from and held out"),
        ([([0, 1], [])], InvalidType, "whole numbers"),
        ([([0, 1], np.array([], dtype=int))], InvalidData, "empty part"),
        ([([0, 1], [8])], InvalidArgument, "names row 8; there are 8"),
        ([([True, False], [False, True])], InvalidArgument, "mask of shape"),
        ([([0.5], [1])], InvalidType, "whole numbers"),
    ],
)
def test_wrong_folds_are_refused(cv, error, words):
    with pytest.raises(error, match=words):
        as_splits(cv, 8, np.arange(8.0), seed=0)
