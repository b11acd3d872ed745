"""Tests of the progress bar, shown on a terminal and silent elsewhere, and of functions that look on."""

from __future__ import annotations

import sys
import warnings
from itertools import pairwise

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


# --- a function that looks on ----------------------------------------------------------------------------------------

FITS = {
    "MAP": kn.MAP(epochs=300),
    "MeanFieldVI": kn.MeanFieldVI(epochs=300),
    "FullRankVI": kn.FullRankVI(epochs=300),
    "DeepEnsemble": kn.DeepEnsemble(2, epochs=300),
    "HMC": kn.HMC(chains=2, draws=60, warmup=40, steps=3),
}


@pytest.mark.parametrize("name", FITS)
def test_a_function_sees_the_posterior_as_it_comes_and_changes_nothing(name):
    model, (x, y) = linear_model(), linear_data()
    seen = []

    def look(progress):
        torch.randn(3)  # takes random numbers of its own
        found = progress.posterior()
        assert 0 < progress.done <= progress.total and isinstance(progress.text, str)
        seen.append((progress.label, progress.done, found.predict(x, samples=8).mean))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        told = FITS[name].fit(model, (x, y), progress=look)
        alone = FITS[name].fit(model, (x, y), progress=False)
    first, last = seen[0], [each for each in seen if each[0] == seen[-1][0]]
    assert [done for _, done, _ in last] == sorted(done for _, done, _ in last) and len(seen) >= 3
    assert not torch.equal(first[2], seen[-1][2])
    shown = told.predict(x, samples=8).mean
    torch.testing.assert_close(seen[-1][2], shown)
    torch.testing.assert_close(alone.predict(x, samples=8).mean, shown, rtol=0, atol=0)


def test_the_terms_are_those_of_the_history():
    seen = []
    found = kn.MeanFieldVI(epochs=300).fit(linear_model(), linear_data(), progress=lambda each: seen.append(each.terms))
    assert seen == [{name: each[name] for name in each if name != "step"} for each in found.diagnostics.history]


def test_a_function_can_end_a_fit():
    def stop(progress):
        if progress.done >= 200:
            raise KeyboardInterrupt

    with pytest.warns(kn.Interrupted):
        found = kn.MAP(epochs=100_000).fit(linear_model(), linear_data(), progress=stop)
    assert found.diagnostics.interrupted

    def fail(progress):
        raise LookupError("of its own")

    with pytest.raises(LookupError, match="of its own"):
        kn.MAP(epochs=300).fit(linear_model(), linear_data(), progress=fail)


def test_what_was_seen_does_not_change_as_the_fit_goes_on():
    (x, y), seen = linear_data(), []
    kn.MeanFieldVI(epochs=400).fit(linear_model(), (x, y), progress=lambda each: seen.append(each.posterior()))
    means = [torch.cat([value.flatten() for value in each.mean().values()]) for each in seen]
    assert len(means) == 4 and all(not torch.equal(a, b) for a, b in pairwise(means))


def test_chains_report_where_they_are_in_the_warm_up_and_their_draws_after_it():
    seen = []
    method = kn.HMC(chains=2, draws=50, warmup=50, steps=3, start="prior")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        method.fit(
            linear_model(), linear_data(), progress=lambda each: seen.append((each.text, len(each.posterior()) // 2))
        )
    assert {count for text, count in seen if text == "warm-up" and count != 1} == set()
    drawing = [count for text, count in seen if text == "drawing"]
    assert drawing == sorted(drawing) and drawing[-1] == 50
