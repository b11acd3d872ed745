"""Tests of the settings of sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest

import knowable as kn
from knowable.core.chains.settings import STARTS, ChainSettings, ChainStorage
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
        ({"start": "mapp"}, kn.InvalidArgument),
        ({"start": 3}, kn.InvalidType),
        ({"start": None}, kn.InvalidType),
        ({"temperature": 0.0}, kn.InvalidArgument),
        ({"temperature": -1}, kn.InvalidArgument),
        ({"temperature": math.inf}, kn.InvalidArgument),
        ({"storage": "1GB"}, kn.InvalidType),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong, error):
    with pytest.raises(error, match=next(iter(wrong))):
        ChainSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"thin": 0}, kn.InvalidArgument),
        ({"dtype": "float16"}, kn.InvalidArgument),
        ({"max_memory": "lots"}, kn.InvalidArgument),
        ({"max_memory": -5}, kn.InvalidArgument),
        ({"file": 7}, kn.InvalidType),
    ],
    ids=str,
)
def test_storage_that_makes_no_sense_is_refused_by_name(wrong, error):
    with pytest.raises(error, match=next(iter(wrong))):
        ChainStorage(**wrong)


@pytest.mark.parametrize(
    ("old", "new"), [("thin", "thin"), ("store", "dtype"), ("max_memory", "max_memory"), ("spill", "file")]
)
def test_settings_that_have_moved_are_refused_with_their_new_spelling(old, new):
    with pytest.raises(kn.InvalidType, match=rf"Write storage=kn.ChainStorage\({new}=...\)"):
        kn.NUTS(**{old: 1})


@pytest.mark.parametrize("start", STARTS)
def test_every_start_is_taken(start):
    assert ChainSettings(start=start).start == start


def test_a_posterior_is_taken_as_a_start():
    posterior = diagonal_posterior(linear_model())
    assert ChainSettings(start=posterior).start is posterior


def test_what_is_a_number_in_other_words_is_taken(tmp_path):
    storage = ChainStorage(thin=np.int64(2), max_memory=10**9, file=tmp_path)
    settings = ChainSettings(chains=np.int64(4), draws=np.int32(5), warmup=0, temperature=1, storage=storage)
    assert settings.chains == 4 and settings.draws == 5


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        ChainSettings().chains = 3  # type: ignore[misc]


def test_a_target_that_is_not_bayes_is_noted():
    assert ChainSettings().temperature_note() == ()
    assert ChainSettings(temperature=1).temperature_note() == ()
    (note,) = ChainSettings(temperature=0.5).temperature_note()
    assert "temperature=0.5" in note and "not the Bayes posterior" in note
