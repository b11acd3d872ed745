"""Tests of rows that stand for many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import knowable as kn
from knowable.decisions.coreset import Coreset, k_centre


def slow_k_centre(x, first, count):
    """The definition: the row whose nearest chosen row is the furthest away."""
    chosen = [first]
    while len(chosen) < count:
        distances = [min((x[i] - x[j]).norm().item() for j in chosen) for i in range(len(x))]
        chosen.append(max((d, -i) for i, d in enumerate(distances) if i not in chosen)[1] * -1)
    return chosen


def test_k_centre_is_the_greedy_cover(seed):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = k_centre(x, 8, seed=seed).tolist()
    assert found == slow_k_centre(x, found[0], 8)


def test_k_centre_covers_what_is_not_covered_yet():
    x = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    assert k_centre(x, 1, chosen=torch.tensor([[0.4]])).tolist() == [3]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_no_row_is_chosen_twice(rows, count, equal):
    x = torch.zeros(rows, 2) if equal else torch.arange(rows * 2.0).view(rows, 2)
    count = min(rows, count)
    assert len(set(k_centre(x, count).tolist())) == count


def test_random_rows_are_distinct_and_depend_on_the_seed_alone():
    x = torch.randn(50, 2)
    one, again, other = (Coreset(20).indices(x, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other) and len(one.unique()) == 20


def test_a_coreset_must_be_smaller_than_the_task():
    with pytest.raises(kn.InvalidArgument, match="smaller than the task, which has 5 rows; got 5"):
        Coreset(5).indices(torch.zeros(5, 1))
    with pytest.raises(kn.InvalidArgument, match="choose"):
        Coreset(5, choose="best")
