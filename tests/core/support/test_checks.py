"""Tests of the checks at the door."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.errors import InvalidArgument, InvalidType


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1.0), np.int64(1), Fraction(1)])
def test_check_number_returns_a_float_for_every_kind_of_real_number(value):
    number = check_number("scale", value, above=0)
    assert number == 1.0
    assert type(number) is float


@pytest.mark.parametrize(
    ("value", "bounds", "wanted"),
    [
        (0, {"above": 0}, r"scale must be a finite number > 0, got 0\."),
        (-1, {"at_least": 0}, r"scale must be a finite number >= 0, got -1\."),
        (1, {"above": 0, "below": 1}, r"scale must be a finite number > 0 and < 1, got 1\."),
        (2.5, {"at_most": 2}, r"scale must be a finite number <= 2, got 2.5\."),
        (float("nan"), {}, r"scale must be a finite number, got nan\."),
        (float("inf"), {}, r"scale must be a finite number, got inf\."),
        (np.float64("-inf"), {"above": 0}, r"scale must be a finite number > 0, got .*-inf"),
    ],
)
def test_check_number_refuses_a_number_out_of_bounds_naming_bound_and_value(value, bounds, wanted):
    with pytest.raises(InvalidArgument, match=wanted):
        check_number("scale", value, **bounds)


@pytest.mark.parametrize("value", ["1.0", None, True, [1.0], 1j])
def test_check_number_refuses_what_is_not_a_real_number(value):
    with pytest.raises(InvalidType, match=rf"scale must be a number, got {type(value).__name__}"):
        check_number("scale", value)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_check_count_returns_an_int_for_every_kind_of_whole_number(value):
    assert type(check_count("n", value)) is int
    assert check_count("n", value) == 3


@pytest.mark.parametrize(
    ("value", "bounds", "wanted"),
    [
        (0, {}, r"n must be a whole number >= 1, got 0\."),
        (-1, {"at_least": 0}, r"n must be a whole number >= 0, got -1\."),
        (11, {"at_most": 10}, r"n must be a whole number >= 1 and <= 10, got 11\."),
    ],
)
def test_check_count_refuses_a_count_out_of_bounds(value, bounds, wanted):
    with pytest.raises(InvalidArgument, match=wanted):
        check_count("n", value, **bounds)


@pytest.mark.parametrize("value", [1.0, True, "1", None])
def test_check_count_refuses_what_is_not_a_whole_number(value):
    with pytest.raises(InvalidType, match="n must be a whole number, got"):
        check_count("n", value)


def test_check_choice_returns_a_known_choice():
    assert check_choice("mode", "fast", ("fast", "slow")) == "fast"


def test_check_choice_lists_the_choices_and_the_nearest_one():
    with pytest.raises(
        InvalidArgument, match=r"mode must be one of 'fast', 'slow'; got 'fsat'\. Did you mean 'fast'\?"
    ):
        check_choice("mode", "fsat", ("fast", "slow"))


@pytest.mark.parametrize("value", [3, None, "qqq", ["fast"]])
def test_check_choice_makes_no_guess_where_nothing_is_near(value):
    with pytest.raises(InvalidArgument) as caught:
        check_choice("mode", value, ("fast", "slow"))
    assert str(caught.value).endswith(f"got {value!r}.") or "Did you mean 'fast'" in str(caught.value)


def test_check_type_says_what_was_expected_and_what_came():
    assert check_type("prior", 3, int, "a whole number") == 3
    with pytest.raises(InvalidType, match=r"prior must be a whole number, got str 'x'\."):
        check_type("prior", "x", int, "a whole number")


def test_a_long_value_is_named_by_its_type_alone():
    with pytest.raises(InvalidType, match=r"prior must be a number, got a list\."):
        check_number("prior", list(range(1000)))
