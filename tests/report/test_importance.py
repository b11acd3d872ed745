"""Which inputs matter."""

import numpy as np
import pytest
import torch

from knowable.evaluation.scores import nll_rows
from knowable.report import input_panels as importance
from knowable.report.input_panels import importance_panel, importances
from tests.report.fitted import linear_fit


@pytest.fixture(scope="module")
def fitted():
    return linear_fit(rows=400)


@pytest.fixture(scope="module")
def found(fitted):
    return importances(fitted.predict, fitted.inputs, fitted.y, "abc", seed=3)


def test_inputs_are_ranked_by_their_slopes_and_one_that_says_nothing_is_worth_nothing(found):
    # slopes 2, -1, 0: shuffling costs (slope² · E(x-x')²) / (2 noise²) = slope² / noise² nats = 16, 4 and 0
    assert [each.name for each in found] == ["a", "b", "c"]
    for each, expected in zip(found, (16.0, 4.0, 0.0), strict=True):
        assert abs(each.gain - expected) < 5 * each.error + 0.05  # the slopes themselves are known to about 0.03


def test_the_loss_is_that_of_a_slow_loop_over_rows(fitted):
    frame, y = fitted.inputs, fitted.y
    (only,) = importances(fitted.predict, frame, y, ["a"], seed=5)
    generator = np.random.default_rng(5)
    generator.choice(len(frame), len(frame), replace=False)  # the choice of rows comes first
    moved = importance._elsewhere(len(frame), generator)
    total = 0.0
    for row in range(len(frame)):
        other = frame.iloc[[row]].assign(a=frame["a"].iloc[moved[row]])
        before, after = fitted.predict(frame.iloc[[row]]), fitted.predict(other)
        total += (nll_rows(after, y[[row]]) - nll_rows(before, y[[row]])).item()
    assert only.gain == pytest.approx(total / len(frame), rel=1e-6)


def test_no_row_keeps_its_value(seed):
    for count in (2, 3, 10, 101):
        moved = importance._elsewhere(count, np.random.default_rng(seed))
        assert sorted(moved) == list(range(count)) and not (moved == np.arange(count)).any()


def test_of_very_many_inputs_those_that_move_the_prediction_are_looked_at(fitted, monkeypatch):
    monkeypatch.setattr(importance, "_MOST_INPUTS", 2)
    some = importances(fitted.predict, fitted.inputs, fitted.y, "abc")
    assert {each.name for each in some} == {"a", "b"}


def test_the_panel_says_in_words_what_it_shows(found):
    panel = importance_panel(found)
    assert panel.names == ("a", "b", "c") and "a 1" in panel.alt
    assert panel.values == tuple(each.gain for each in found)
    assert importance_panel([]) is None


def test_a_single_row_has_no_importances(fitted):
    assert importances(fitted.predict, fitted.inputs.iloc[:1], torch.zeros(1), "abc") == ()
