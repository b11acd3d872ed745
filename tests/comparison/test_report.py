"""The page of a comparison, its forest plots, and the ranking for notebooks."""

from __future__ import annotations

import builtins
import math

import matplotlib as mpl
import pytest

from knowable.comparison.journal import Record
from knowable.comparison.report import comparison_report
from knowable.errors import InvalidArgument, MissingExtra
from knowable.report import render
from tests.comparison.cases import HOSTILE, THREE, made_up, record
from tests.report.pages import check_golden


def whole(label: str = "label"):
    """A comparison with every part, and ``label`` wherever words from outside can be."""
    records = [
        record(f"{label} {name}", fold, nll=value, coverage_90=0.9)
        for name, values in THREE.items()
        for fold, value in enumerate(values)
    ]
    records.append(Record(f"{label} d", "d", 0, scores={"nll": 9.0}, agreement={label: 0.5}, warnings=(label,)))
    records.append(Record(f"{label} d", "d", 1, error=label))
    methods = (*(f"{label} {name}" for name in "abcd"), label)
    return made_up(
        THREE, records=tuple(records), methods=methods, not_run=((label, 0),), reference=f"{label} a",
        facts={label: label, "Rows": "9"}, notices=(label,), citations={f"{label} a": (label,), f"{label} b": (label,)},
    )  # fmt: skip


def test_the_page_says_what_it_said_before():
    check_golden(render(comparison_report(whole())), "comparison")


def test_words_from_outside_are_escaped_wherever_they_appear():
    page, fragment = whole(HOSTILE).to_html(), whole(HOSTILE)._repr_html_()
    assert page.lower().count("<script") == 1 and "alert('" not in page and "<script" not in fragment.lower()


def test_a_reference_that_was_never_fitted_is_said():
    assert "not fitted on any fold" in made_up(THREE, reference="a").to_html()


def test_without_jinja_a_notebook_shows_the_text(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert made_up(THREE)._repr_html_() is None


def test_methods_are_named_from_the_best_down_and_marks_stand_at_their_means():
    left, right = made_up(THREE).plot().axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b", "c"]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # the best on top
    means = [line.get_xdata()[0] for line in left.lines if line.get_marker() in ("D", "o", "s")]
    assert sorted(set(means)) == pytest.approx([2.0, 2.1, 5.0])
    assert "minus that of a" in right.get_xlabel() and "lower is better" in left.get_xlabel()


def test_another_score_can_be_drawn_and_one_without_a_direction_cannot():
    figure = made_up(THREE, higher=THREE).plot("accuracy")
    assert "Accuracy" in figure.axes[0].get_xlabel()
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
    with pytest.raises(MissingExtra, match=r"pip install 'knowable\[report\]'"):
        made_up(THREE).plot()
