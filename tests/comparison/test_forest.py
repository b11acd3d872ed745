"""Marks stand where their numbers say, ticks are round and hold all of them, and names are escaped."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowable.comparison.forest import COLOURS, Mark, forest, nice_ticks, tick_text
from tests.comparison.cases import HOSTILE

MARKS = [
    Mark("first", 1.0, 0.5, "1.0 ± 0.5", "best"),
    Mark("second", 2.0, 0.0, "2.0", "tied"),
    Mark("third", 4.0, 1.0, "4 ± 1", "worse"),
    Mark("last", math.inf, 0.0, "∞", "worse"),
]


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(markup)


def test_marks_stand_where_their_numbers_say():
    # ticks from 0 to 5 lie from x = 12 to x = 408: a unit is 79.2 wide
    svg = parsed(forest(MARKS, axis="score", alt="words"))
    groups = svg.findall("g")
    circle = groups[1].find("circle")
    assert circle is not None and float(circle.attrib["cx"]) == pytest.approx(12 + 2 * 79.2, abs=0.1)
    square = groups[2].find("rect")
    assert square is not None and float(square.attrib["x"]) + 4 == pytest.approx(12 + 4 * 79.2, abs=0.1)
    bar = groups[2].find("path")
    assert bar is not None and bar.attrib["d"].startswith(f"M{12 + 3 * 79.2:.1f} ")
    assert len(groups[1].findall("path")) == 0  # no error, no bar


def test_what_is_infinite_is_said_and_not_drawn():
    last = parsed(forest(MARKS, axis="score", alt="words")).findall("g")[3]
    assert [child.tag for child in last] == ["title", "text"] and last[1].text == "last: ∞"


def test_the_drawing_can_be_read_aloud_and_every_mark_says_its_numbers():
    svg = parsed(forest(MARKS, axis="score", alt="all in words"))
    assert svg.attrib["role"] == "img" and svg.attrib["aria-label"] == "all in words"
    assert [group[0].text for group in svg.findall("g")] == [f"{mark.name}: {mark.text}" for mark in MARKS]


def test_names_from_outside_are_escaped():
    markup = forest([Mark(HOSTILE, 1.0, 0.1, HOSTILE, "best")], axis=HOSTILE, alt=HOSTILE)
    assert "<script" not in markup and parsed(markup).attrib["aria-label"] == HOSTILE


def test_zero_is_inside_where_it_matters_and_nothing_at_all_can_be_drawn():
    texts = [each.text for each in parsed(forest(MARKS, axis="d", alt="a", zero=True)).findall("text")]
    assert "0" in texts
    parsed(forest([MARKS[3]], axis="d", alt="a"))
    parsed(forest([Mark("same", 2.0, 0.0, "2", "best")], axis="d", alt="a"))


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_even_few_and_hold_the_range(low, width):
    ticks = nice_ticks(low, low + width)
    gaps = [after - before for before, after in itertools.pairwise(ticks)]
    assert 2 <= len(ticks) <= 6 and min(gaps) > 0
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3)
    slack = 1e-6 * max(gaps) + 1e-9 * abs(low)
    assert ticks[0] <= low + slack and ticks[-1] >= low + width - slack


def test_ticks_have_the_digits_they_need():
    assert [tick_text(tick, [0.0, 0.5, 1.0]) for tick in (0.0, 0.5, 1.0)] == ["0.0", "0.5", "1.0"]
    assert tick_text(20.0, [0.0, 20.0]) == "20" and tick_text(2e6, [0.0, 1e6]) == "2e+06"


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", sorted(set(COLOURS.values())))
def test_colours_stand_out_from_the_page(colour):
    assert 1.05 / (luminance(colour) + 0.05) >= 4.5  # against white, the contrast asked of text
