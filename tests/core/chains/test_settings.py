"""Tests of the settings of sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest

import knowable as kn
from knowable.core.chains.settings import STARTS, Sampling
from tests.core.cases import diagonal_posterior, linear_model


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"chains": 0}, kn.InvalidArgument),
        ({"chains": 2.0}, kn.InvalidType),
        ({"chains": True}, kn.InvalidType),
        ({"draws": 0}, kn.InvalidArgument),
        ({"draws": "many"}, kn.InvalidType),
        ({"warmup": -1}, kn.InvalidArgument),
        ({"thin": 0}, kn.InvalidArgument),
        ({"start": "mapp"}, kn.InvalidArgument),
        ({"start": 3}, kn.InvalidType),
        ({"start": None}, kn.InvalidType),
        ({"temperature": 0.0}, kn.InvalidArgument),
        ({"temperature": -1}, kn.InvalidArgument),
        ({"temperature": math.inf}, kn.InvalidArgument),
        ({"store": "float16"}, kn.InvalidArgument),
        ({"max_memory": "lots"}, kn.InvalidArgument),
        ({"max_memory": -5}, kn.InvalidArgument),
        ({"spill": 7}, kn.InvalidType),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong, error):
    with pytest.raises(error, match=next(iter(wrong))):
        Sampling(**wrong)


@pytest.mark.parametrize("start", STARTS)
def test_every_start_is_taken(start):
    assert Sampling(start=start).start == start


def test_a_posterior_is_taken_as_a_start():
    posterior = diagonal_posterior(linear_model())
    assert Sampling(start=posterior).start is posterior


def test_what_is_a_number_in_other_words_is_taken(tmp_path):
    settings = Sampling(
        chains=np.int64(4), draws=np.int32(5), warmup=0, temperature=1, max_memory=10**9, spill=tmp_path
    )
    assert settings.chains == 4 and settings.draws == 5


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        Sampling().chains = 3  # type: ignore[misc]


def test_a_target_that_is_not_bayes_is_noted():
    assert Sampling().temperature_note() == ()
    assert Sampling(temperature=1).temperature_note() == ()
    (note,) = Sampling(temperature=0.5).temperature_note()
    assert "temperature=0.5" in note and "not the Bayes posterior" in note
