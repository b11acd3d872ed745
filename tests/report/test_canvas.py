"""The sheet that figures are drawn on."""

from knowable.report.canvas import POINTS, WIDTH, finish, new_figure, per_cent


def test_a_figure_counts_in_points_as_its_svg_does():
    figure = new_figure(2.0)
    assert figure.dpi == POINTS and tuple(figure.bbox.size) == (WIDTH * POINTS, 2.0 * POINTS)


def test_axes_are_named_and_a_legend_is_there_only_where_something_has_a_name():
    figure = new_figure()
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1])
    finish(figure, axes, "x", "y")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y") and not figure.legends
    axes.plot([0, 1], [1, 0], label="named")
    assert len(finish(figure, axes, "x", "y").legends) == 1


def test_shares_are_written_in_per_cent():
    axes = new_figure().add_subplot()
    per_cent(axes.xaxis)
    assert axes.xaxis.get_major_formatter()(0.25, 0) == "25%"
