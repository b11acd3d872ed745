"""Means, paired differences and the order of methods, against NumPy, SciPy and counting by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from knowable.comparison.statistics import columns_in, estimate, order, paired, paired_rows, ranking, ranking_column
from knowable.errors import InvalidArgument
from tests.comparison.cases import THREE

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8)


def by_fold(values):
    return {fold: value for fold, value in enumerate(values) if not math.isnan(value)}


@given(NUMBERS)
def test_mean_and_standard_error_are_those_of_scipy(values):
    found = estimate(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.standard_error == pytest.approx(stats.sem(values), abs=1e-9)
    assert found.folds == len(values)


def test_one_fold_has_no_standard_error_and_none_has_no_mean():
    assert estimate([2.0]).mean == 2.0 and math.isnan(estimate([2.0]).standard_error)
    assert math.isnan(estimate([]).mean) and estimate([]).folds == 0


def test_infinite_scores_have_an_infinite_mean_and_missing_ones_none():
    assert estimate([1.0, math.inf]).mean == math.inf and math.isnan(estimate([1.0, math.inf]).standard_error)
    assert math.isnan(estimate([1.0, math.nan]).mean)


def test_paired_differences_are_a_paired_t_test():
    a, b = [1.0, 2.5, 3.0, 4.4], [0.5, 2.0, 3.5, 4.0]
    found = paired(by_fold(a), by_fold(b))
    assert found.mean / found.standard_error == pytest.approx(stats.ttest_rel(a, b).statistic)


def test_pairs_are_taken_over_the_folds_that_both_have():
    found = paired({0: 1.0, 1: 2.0, 3: 9.0}, {1: 1.0, 3: 5.0, 4: 7.0})
    assert (found.mean, found.folds) == (2.5, 2)


def test_a_shift_of_all_methods_on_a_fold_changes_no_difference():
    # folds as hard as 0, 10 and 100: the means have large errors, their difference none at all
    a, b = by_fold([1.0, 11.0, 101.0]), by_fold([2.0, 12.0, 102.0])
    assert estimate(a.values()).standard_error > 30
    assert paired(b, a).mean == 1.0 and paired(b, a).standard_error == 0.0


@given(st.lists(NUMBERS.filter(lambda v: len(v) >= 3).map(lambda v: v[:3]), min_size=1, max_size=5))
def test_with_all_folds_methods_are_in_the_order_of_their_means(columns):
    losses = {str(number): by_fold(values) for number, values in enumerate(columns)}
    found = [np.mean(list(losses[name].values())) for name in order(losses)]
    assert all(first <= second + 1e-9 for first, second in itertools.pairwise(found))


def test_nobody_gains_by_missing_a_hard_fold():
    # b is worse than a on every fold, but lacks the hard one, so that its plain mean is lower
    losses = {"a": by_fold([1.0, 1.0, 10.0]), "b": by_fold([2.0, 2.0])}
    assert estimate(losses["b"].values()).mean < estimate(losses["a"].values()).mean
    assert order(losses) == ["a", "b"]


def test_a_better_method_with_fewer_folds_comes_first():
    assert order({"a": by_fold([1.0, 1.0, 1.0]), "b": by_fold([math.nan, 0.5])}) == ["b", "a"]


def test_methods_without_folds_are_left_out_and_infinite_ones_come_last():
    losses = {"none": {}, "bad": by_fold([1.0, math.inf]), "good": by_fold([5.0, 6.0])}
    assert order(losses) == ["good", "bad"]
    assert order({"none": {}}) == []
    assert order({"one": by_fold([math.inf, math.inf])}) == ["one"]


def test_places_say_who_is_tied_and_who_is_worse():
    places = ranking({name: by_fold(values) for name, values in THREE.items()})
    assert [(place.rank, place.method, place.verdict) for place in places] == [
        (1, "a", "best"), (2, "b", "tied"), (3, "c", "worse"),
    ]  # fmt: skip
    assert places[1].difference.mean == pytest.approx(0.1)
    assert places[1].difference.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert places[0].difference.mean == 0.0


def test_where_higher_is_better_the_highest_is_first_and_differences_keep_their_sign():
    places = ranking({name: by_fold(values) for name, values in THREE.items()}, higher=True)
    assert [place.method for place in places] == ["c", "b", "a"]
    assert places[2].difference.mean == -3.0 and places[2].verdict == "worse"


def test_one_fold_cannot_tell_methods_apart_unless_one_is_infinitely_bad():
    places = ranking({"a": {0: 1.0}, "b": {0: 2.0}, "c": {0: math.inf}})
    assert [place.verdict for place in places] == ["best", "unclear", "worse"]


def test_scores_come_in_the_order_of_tables_whatever_the_order_they_are_named_in():
    assert [column.name for column in columns_in(["seconds", "nll", "rmse", "unknown"])] == [
        *("nll", "rmse", "seconds", "unknown")  # one without a column of its own is shown as well
    ]


def test_methods_cannot_be_ranked_by_a_score_without_a_direction_or_one_that_is_not_there():
    assert ranking_column("crps", ["crps"]).name == "crps"
    for name in ("coverage_90", "mean_entropy", "rmse"):
        with pytest.raises(InvalidArgument, match=f"one that ranks methods: crps; got '{name}'"):
            ranking_column(name, ["crps", "coverage_90", "mean_entropy"])


def test_differences_of_rows_have_the_mean_and_error_of_a_paired_t_test(seed):
    draw = np.random.default_rng(seed)
    one, other = ({fold: draw.normal(size=7 + fold).tolist() for fold in range(3)} for _ in range(2))
    found = paired_rows(one, other)
    away = np.concatenate([np.array(one[fold]) - other[fold] for fold in range(3)])
    assert found is not None and found.folds == 3
    assert found.mean == pytest.approx(away.mean())
    assert found.mean / found.standard_error == pytest.approx(stats.ttest_1samp(away, 0.0).statistic)
    assert paired_rows(one, {**other, 1: []}) is None  # a fold without rows: folds decide then


def test_rows_decide_a_tie_that_folds_cannot_tell():
    # two folds of the same mean difference, whose error over folds is 0; the rows say that it is noise
    folds = {"a": {0: 1.0, 1: 1.0}, "b": {0: 1.1, 1: 1.1}}
    rows = {"a": {0: [0.0, 2.0], 1: [0.0, 2.0]}, "b": {0: [2.1, 0.1], 1: [2.1, 0.1]}}
    assert ranking(folds)[1].verdict == "worse"
    assert ranking(folds, rows=rows)[1].verdict == "tied"
