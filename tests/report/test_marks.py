"""What can be read off figures."""

import re

import pytest

from knowable.report.drawing import draw
from knowable.report.marks import marks_of
from knowable.report.panels import Axes, Line, LinesPanel, Panel, TruthPanel
from tests.interfaces.cases import every_panel


def scatter(count=3):
    numbers = tuple(float(i) for i in range(count))
    return TruthPanel(
        title="t", caption="", alt="a", axes=Axes("x", "y"), level=0.9, truth=numbers[::-1], mean=numbers,
        low=tuple(n - 1 for n in numbers), high=tuple(n + 1 for n in numbers), rows=tuple(range(2, count + 2)),
    )  # fmt: skip


def test_rows_are_read_in_the_order_of_the_truth_with_line_and_interval():
    marks = marks_of(scatter())
    assert [mark.x for mark in marks] == [0.0, 1.0, 2.0] and [mark.row for mark in marks] == [4, 3, 2]
    assert marks[0].text == "line 4: observed 0, predicted 2, outside 1 to 3"
    assert "inside" in marks[1].text


def test_every_row_can_be_looked_up_and_long_curves_are_thinned():
    assert len(marks_of(scatter(600))) == 600
    numbers = tuple(float(i) for i in range(5000))
    lines = LinesPanel(title="t", caption="", alt="a", axes=Axes("x", "y"), lines=(Line("l", numbers, numbers),))
    assert 200 < len(marks_of(lines)) <= 400


def test_every_figure_but_pictures_has_marks_with_words(generator):
    for panel in every_panel(generator):
        marks = marks_of(panel)
        assert bool(marks) == (panel.kind != "pictures")
        assert all(mark.text for mark in marks)
    assert marks_of(Panel("t", "c", "a", "pie")) == ()


def test_marks_are_placed_where_the_drawing_has_them():
    # the corners of a plot: x grows to the right, y grows downwards on the page
    drawing = draw(
        LinesPanel(title="t", caption="", alt="a", axes=Axes("x", "y"), lines=(Line("l", (0.0, 1.0), (0.0, 1.0)),)),
        key="k",
    )
    first, last = drawing.marks
    assert first.x < last.x and first.y > last.y
    width, height = (float(part) for part in drawing.svg.split('viewBox="0 0 ')[1].split('"')[0].split())
    assert 0 < first.x < last.x < width and 0 < last.y < first.y < height


def test_marks_lie_on_the_path_that_is_drawn():
    line = Line("l", (0.0, 1.0, 3.0), (2.0, 7.0, 1.0))
    drawing = draw(LinesPanel(title="t", caption="", alt="a", axes=Axes("x", "y"), lines=(line,)), key="k")
    paths = [part.split('"')[0] for part in drawing.svg.split(' d="')[1:]]
    corners = [
        [float(number) for number in re.findall(r"[\d.]+", path)] for path in paths if re.fullmatch(r"[ML\d\s.]+", path)
    ]
    wanted = [number for mark in drawing.marks for number in (mark.x, mark.y)]
    assert any(found == pytest.approx(wanted, abs=0.06) for found in corners)  # marks are rounded to a tenth


def test_what_is_outside_the_axes_or_not_finite_has_no_mark():
    nan = float("nan")
    panel = LinesPanel(title="t", caption="", alt="a", axes=Axes("x", "y"), lines=(Line("l", (0.0, 1.0), (0.0, nan)),))
    assert len(draw(panel, key="k").marks) == 1


@pytest.mark.parametrize("place", range(12))
def test_marks_stay_inside_every_drawing(place, generator):
    panel = every_panel(generator)[place]
    drawing = draw(panel, key="k")
    width, height = (float(part) for part in drawing.svg.split('viewBox="0 0 ')[1].split('"')[0].split())
    assert drawing.marks and all(0 <= mark.x <= width and 0 <= mark.y <= height for mark in drawing.marks)
