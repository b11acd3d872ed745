"""Figures are drawn without touching anything global."""

from __future__ import annotations

import builtins

import matplotlib as mpl
import pytest

from knowable.core.support.figure import new_figure
from knowable.errors import MissingExtra


def test_a_figure_has_the_size_asked_for_and_what_was_drawn(tmp_path):
    figure = new_figure(4.0, 2.0, lambda made: made.add_subplot().set_title("a title"))
    assert figure.get_size_inches().tolist() == [4.0, 2.0]
    assert figure.axes[0].get_title() == "a title"
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_settings_are_those_of_the_figure_alone():
    before, seen = dict(mpl.rcParams), []
    new_figure(2.0, 2.0, lambda made: seen.append(mpl.rcParams["axes.spines.top"]))
    assert seen == [False]
    assert dict(mpl.rcParams) == before


def test_a_missing_matplotlib_is_named(monkeypatch):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"knowable\[report\]"):
        new_figure(2.0, 2.0, lambda made: None)
