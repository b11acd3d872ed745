"""The plot shows every method's mean and its difference from the best, in the order of the ranking."""

from __future__ import annotations

import builtins
import math

import matplotlib as mpl
import pytest

from knowable.errors import InvalidArgument, MissingExtra
from tests.comparison.cases import HOSTILE, THREE, made_up


def test_methods_are_named_from_the_best_down_and_marks_stand_at_their_means():
    left, right = made_up(THREE).plot().axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b", "c"]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # the best on top
    means = [line.get_xdata()[0] for line in left.lines if line.get_marker() in ("D", "o", "s")]
    assert sorted(set(means)) == pytest.approx([2.0, 2.1, 5.0])
    assert "less that of a" in right.get_xlabel() and "lower is better" in left.get_xlabel()


def test_another_score_can_be_drawn_and_one_without_a_direction_cannot():
    figure = made_up(THREE, higher=THREE).plot("accuracy")
    assert "accuracy" in figure.axes[0].get_xlabel()
    with pytest.raises(InvalidArgument, match="ranks methods"):
        made_up(THREE).plot("coverage_90")


def test_it_is_written_to_a_file_and_leaves_the_settings_alone(tmp_path):
    before = dict(mpl.rcParams)
    made_up({HOSTILE: [1.0, 2.0], "$b$": [1.0, math.inf], "c": [3.0, 3.0]}).plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert dict(mpl.rcParams) == before


def test_without_matplotlib_the_extra_to_install_is_named(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"pip install knowable\[report\]"):
        made_up(THREE).plot()
