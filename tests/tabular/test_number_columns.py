"""Tests of columns of numbers and dates, against the definitions of what they compute."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import knowable as kn
from knowable.tabular import read_table
from knowable.tabular.number_columns import DateColumn, NumericColumn, as_seconds, kurtosis, middle_and_unit, signed_log


def numeric(values, given=None) -> NumericColumn:
    return NumericColumn.learn(read_table({"c": values}), "c", given)


def test_numbers_are_centred_and_scaled(seed: int):
    values = np.random.default_rng(seed).normal(50, 7, size=300)
    found = numeric(values).encode(read_table({"c": values}))[:, 0]
    np.testing.assert_allclose(found, (values - values.mean()) / values.std(), rtol=1e-10)


def test_what_is_missing_becomes_the_median():
    column = numeric([1.0, 2.0, 10.0, None])
    found = column.encode(read_table({"c": [2.0, None]}))
    assert found[0, 0] == found[1, 0]
    assert column.median == 2.0


def test_heavy_tails_are_drawn_in_and_light_ones_are_not(seed: int):
    rng = np.random.default_rng(seed)
    assert not numeric(rng.normal(size=2000)).log
    assert not numeric(rng.uniform(size=2000)).log
    heavy = rng.standard_t(1.5, size=2000)
    column = numeric(heavy)
    assert column.log
    found = column.encode(read_table({"c": heavy}))[:, 0]
    assert kurtosis(found) < kurtosis(heavy) / 5
    np.testing.assert_allclose([found.mean(), found.std()], [0, 1], atol=1e-9)
    assert (np.diff(found[np.argsort(heavy)]) >= 0).all(), "the order of values must stay"


def test_units_do_not_matter(seed: int):
    values = np.random.default_rng(seed).standard_t(1.5, size=500)
    plain = numeric(values).encode(read_table({"c": values}))
    other = numeric(1000 * values - 3).encode(read_table({"c": 1000 * values - 3}))
    np.testing.assert_allclose(plain, other, rtol=1e-6, atol=1e-6)


def test_the_signed_logarithm_is_odd_and_has_slope_one_at_zero():
    x = np.array([-5.0, -1e-8, 0.0, 1e-8, 5.0])
    np.testing.assert_allclose(signed_log(x), -signed_log(-x))
    np.testing.assert_allclose(signed_log(x)[[1, 3]], x[[1, 3]], rtol=1e-6)


def test_kurtosis_is_that_of_scipy(seed: int):
    values = np.random.default_rng(seed).exponential(size=100)
    assert kurtosis(values) == pytest.approx(stats.kurtosis(values, fisher=False))
    assert kurtosis(1e200 * values) == pytest.approx(kurtosis(values))
    assert kurtosis(np.full(5, 3.3)) == 0.0


def test_the_unit_is_the_interquartile_range_where_there_is_one():
    assert middle_and_unit(np.array([0.0, 1.0, 2.0, 3.0, 4.0])) == (2.0, 2.0)
    assert middle_and_unit(np.array([0.0] * 9 + [10.0])) == (0.0, 1.0)  # the mean distance
    assert middle_and_unit(np.array([5.0, 5.0])) == (5.0, 1.0)


def test_a_value_out_of_all_proportion_is_refused_unless_the_kind_is_given():
    values = [*range(50), 1e9]
    with pytest.raises(
        kn.InvalidData, match=r"row 50 .*1e\+09 is 4e\+07 times the usual spread away from the median 25"
    ):
        numeric(values)
    assert numeric(values, "numeric").log


@pytest.mark.parametrize(
    ("training", "now", "told"),
    [
        ([150.0, 170.0, 200.0], [1.5, 1.7, 2.0], True),  # centimetres, then metres
        ([1.5, 1.7, 2.0], [150.0, 170.0, 200.0], True),
        ([-5.0, 0.0, 5.0], [300.0, 310.0], True),
        ([-5.0, 0.0, 5.0], [90.0], False),
        ([1.0, 2.0, 3.0], [4.0, 5.0], False),
        ([0.001, 0.5, 1.0], [2.0], False),
    ],
)
def test_a_jump_as_of_other_units_is_told(training: list[float], now: list[float], told: bool):
    remarks = numeric(training).check(read_table({"c": now}))
    assert bool(remarks) is told
    if told:
        assert "column 'c' has a median of" in remarks[0] and "is it in other units?" in remarks[0]


def test_texts_where_numbers_were_are_refused():
    with pytest.raises(kn.InvalidData, match=r"row 1 .*, column 'c': 'many' is not a number"):
        numeric([1.0, 2.0]).check(read_table({"c": ["1", "many"]}))
    with pytest.raises(kn.InvalidData, match="is infinite"):
        numeric([1.0, float("inf")])


# --- dates -----------------------------------------------------------------------------------------------------------


def dates(values) -> DateColumn:
    return DateColumn.learn(read_table({"c": values}), "c")


def test_seconds_are_those_of_the_calendar():
    table = read_table({"c": ["2024-02-29", "1970-01-01T00:00:10Z", None, "2024-02-29 01:30+01:30"]})
    expected = datetime(2024, 2, 29, tzinfo=UTC).timestamp()
    np.testing.assert_array_equal(as_seconds(table, "c"), [expected, 10.0, np.nan, expected])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_seconds_do_not_depend_on_how_dates_are_stored(unit: str):
    stored = pd.Series(pd.to_datetime(["2024-02-29", "2024-03-01"])).astype(f"datetime64[{unit}]")
    expected = datetime(2024, 2, 29, tzinfo=UTC).timestamp()
    assert as_seconds(read_table({"c": stored}), "c").tolist() == [expected, expected + 86_400]


def test_cycles_are_told_where_the_data_goes_through_them():
    days = pd.date_range("2024-01-01", periods=10).astype(str)
    assert dates(days)._cycles() == {}
    months = pd.date_range("2024-01-01", periods=90).astype(str)
    assert list(dates(months)._cycles()) == ["week"]
    years = pd.date_range("2020-01-01", periods=900).astype(str)
    assert list(dates(years)._cycles()) == ["year", "week"]
    hours = [f"2024-01-01 {hour:02d}:00" for hour in range(24)]
    assert list(dates(hours)._cycles()) == ["day"]


def test_waves_have_the_length_of_their_cycle():
    column = dates(pd.date_range("2020-01-01", periods=900).astype(str))
    assert column.features == (
        "c", "c sine of the year", "c cosine of the year", "c sine of the week", "c cosine of the week",
    )  # fmt: skip
    table = read_table({"c": ["2021-03-01", "2021-03-08", "2021-03-02"]})
    found = column.encode(table)
    np.testing.assert_allclose(found[0, 3:], found[1, 3:], atol=1e-9)  # a week apart
    angle = math.atan2(*found[2, 3:]) - math.atan2(*found[0, 3:])
    assert angle % (2 * math.pi) == pytest.approx(2 * math.pi / 7)  # a day apart


def test_the_trend_is_centred_and_scaled():
    values = pd.date_range("2020-01-01", periods=900).astype(str)
    trend = dates(values).encode(read_table({"c": values}))[:, 0]
    np.testing.assert_allclose([trend.mean(), trend.std()], [0, 1], atol=1e-9)


@pytest.mark.parametrize("wrong", ["someday", "2024-13-01"])
def test_what_is_no_date_is_refused(wrong: str):
    with pytest.raises(kn.InvalidData, match=rf"row 1 .*'{wrong}' is not a date"):
        dates(["2024-01-01", wrong, "2024-01-02"])


def test_numbers_are_no_dates():
    with pytest.raises(kn.InvalidData, match="5 is not a date"):
        dates([5, 6])
