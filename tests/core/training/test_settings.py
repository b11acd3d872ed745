"""The settings of a fit, and what they choose when they are not given."""

from __future__ import annotations

import pytest

import knowable as kn
from knowable.errors import InvalidArgument, InvalidType
from tests.core.training_cases import settings_of


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (1024, 1024), (1025, 128), (60_000, 128)])
def test_small_data_is_one_batch_and_large_data_many(rows, expected):
    assert settings_of().rows_per_step(rows) == expected


def test_a_batch_is_never_larger_than_the_data():
    assert settings_of(batch_size=64).rows_per_step(10) == 10


@pytest.mark.parametrize(("size", "expected"), [(1, 0.01), (10_000, 0.01), (40_000, 0.005), (10**7, 0.001)])
def test_the_step_falls_with_the_root_of_the_dimension(size, expected):
    assert settings_of().step_size(size) == pytest.approx(expected)
    assert settings_of(learning_rate=0.3).step_size(size) == 0.3


@pytest.mark.parametrize(
    ("arguments", "error", "wanted"),
    [
        (
            {"optimiser": "adamw"},
            InvalidArgument,
            "optimiser must be one of 'adam', 'sgd'; got 'adamw'.*mean 'adam'",
        ),
        ({"clip": 0}, InvalidArgument, "clip must be a finite number > 0, got 0"),
        ({"patience": 0}, InvalidArgument, "patience must be a whole number >= 1, got 0"),
        ({"on_divergence": "stop"}, InvalidArgument, "on_divergence must be one of 'halve', 'raise'; got 'stop'"),
        ({"schedule": "rise"}, InvalidArgument, "schedule must be one of 'fall', 'constant'; got 'rise'"),
        ({"accumulate": 0}, InvalidArgument, "accumulate must be a whole number >= 1, got 0"),
        ({"cycles": 0}, InvalidArgument, "cycles must be a whole number >= 1, got 0"),
        ({"cycles": 2, "schedule": "constant"}, InvalidArgument, "cycles must be 1 with schedule='constant'"),
        ({"cycles": 3, "epochs": 2}, InvalidArgument, "cycles must be at most epochs=2, got 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(arguments, error, wanted):
    with pytest.raises(error, match=wanted):
        settings_of(**arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "wanted"),
    [
        ({"epochs": 0}, InvalidArgument, "epochs must be a whole number >= 1, got 0"),
        ({"epochs": 2.5}, InvalidType, "epochs must be a whole number, got float 2.5"),
        ({"learning_rate": 0}, InvalidArgument, "learning_rate must be a finite number > 0, got 0"),
        ({"batch_size": -1}, InvalidArgument, "batch_size must be a whole number >= 1, got -1"),
        ({"training": {"patience": 3}}, InvalidType, r"training must be kn.Training\(...\), got dict"),
    ],
)
def test_settings_of_a_method_that_make_no_sense_are_refused_by_name(arguments, error, wanted):
    with pytest.raises(error, match=wanted):
        kn.MAP(**arguments)


def test_training_prints_only_what_differs_from_its_defaults():
    assert repr(kn.Training()) == "Training()"
    assert repr(kn.Training(clip=1.0, patience=20)) == "Training(clip=1.0)"
