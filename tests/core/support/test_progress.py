"""Tests of the progress bar: shown on a terminal, silent elsewhere."""

from __future__ import annotations

import sys

import pytest
import torch

import knowable as kn
from knowable.core.support.progress import progress_bar
from tests.core.cases import linear_data, linear_model


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_written_off_a_terminal(show, capfd):
    with progress_bar("fitting", show) as bar:
        bar.update(1, 10, "loss 3")
    assert capfd.readouterr() == ("", "")


def test_a_whole_fit_is_silent_off_a_terminal(capfd):
    kn.MeanFieldVI(epochs=3).fit(linear_model(), linear_data())
    assert capfd.readouterr() == ("", "")


def test_a_bar_that_is_asked_for_goes_to_standard_error(capfd):
    with progress_bar("fitting", True) as bar:
        bar.update(5, 10, "loss 3")
    out, err = capfd.readouterr()
    assert out == ""
    assert "fitting" in err
    assert "50%" in err


def test_a_terminal_shows_the_bar_without_being_asked(capfd, monkeypatch):
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    with progress_bar("fitting") as bar:
        bar.update(10, 10, "loss 3")
    assert "fitting" in capfd.readouterr().err


def test_a_bar_that_overshoots_its_total_stays_at_the_end(capfd):
    with progress_bar("fitting", True) as bar:
        bar.update(12, 10, "")
    assert "100%" in capfd.readouterr().err


def test_what_goes_wrong_inside_comes_out():
    with pytest.raises(RuntimeError, match="inside"), progress_bar("fitting", False):
        raise RuntimeError("inside")


@pytest.mark.parametrize("progress", [0, "yes"])
def test_an_answer_that_is_neither_yes_nor_no_is_refused(progress):
    with pytest.raises(kn.InvalidType, match="progress must be True, False or None"):
        kn.MAP(epochs=1).fit(linear_model(), (torch.zeros(3, 2), torch.zeros(3)), progress=progress)
