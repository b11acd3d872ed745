"""Single rows."""

import math

import pandas
import pytest
import torch

from knowable.report.row_panels import certainty_panel, extreme_rows, row_listings, truth_panel
from tests.interfaces.cases import class_prediction, regression_prediction
from tests.report.fitted import linear_fit


def test_every_row_is_drawn_with_its_interval_and_line(generator):
    prediction, y = regression_prediction(12, generator=generator), torch.randn(12, generator=generator)
    panel = truth_panel("y", prediction, y, range(2, 14), level=0.8)
    low, high = prediction.interval(0.8)
    assert panel.rows == tuple(range(2, 14))
    assert panel.truth == pytest.approx(y.tolist()) and panel.low == pytest.approx(low.flatten().tolist())
    held = [a <= b <= c for a, b, c in zip(low.flatten(), y, high.flatten(), strict=True)]
    assert list(panel.inside) == held
    assert f"{sum(held) / 12:.1%}" in panel.alt


def test_of_many_rows_some_are_drawn_evenly_and_those_asked_for_always(generator):
    prediction, y = regression_prediction(1000, draws=2, generator=generator), torch.randn(1000, generator=generator)
    panel = truth_panel("y", prediction, y, range(1000), always=[501, 777])
    assert len(panel.rows) <= 402 and {0, 501, 777, 999} <= set(panel.rows)
    assert panel.truth[panel.rows.index(777)] == pytest.approx(y[777].item())
    assert "of 1000 rows" in panel.caption


def test_the_error_of_the_rows_kept_ends_at_the_error_of_all():
    fitted = linear_fit()
    prediction, y = fitted.predict(fitted.inputs), fitted.y
    panel = certainty_panel({"error": prediction}, y)
    line = panel.lines[0]
    assert line.x[-1] == 1.0
    assert line.y[-1] == pytest.approx(math.sqrt(((prediction.mean.flatten() - y) ** 2).mean().item()), rel=1e-6)


def test_the_share_of_wrong_labels_among_the_surest_rows_is_the_slow_count(generator):
    prediction, y = class_prediction(40, generator=generator), torch.arange(40) % 3
    line = certainty_panel({"error": prediction}, y).lines[0]
    order = prediction.total.double().argsort()
    wrong = (prediction.labels != y)[order].double()
    for share, error in zip(line.x, line.y, strict=True):
        assert error == pytest.approx(wrong[: round(share * 40)].mean().item(), abs=1e-9)


def test_extreme_rows_are_those_with_least_and_most_uncertainty(generator):
    prediction = regression_prediction(9, generator=generator)
    order = prediction.total.flatten().argsort().tolist()
    assert extreme_rows(prediction, 3) == (order[:3], order[::-1][:3])
    most, least = extreme_rows(prediction, 100)
    assert len(most) == len(least) == 4 and not set(most) & set(least)


def test_listings_name_lines_inputs_and_misses(generator):
    prediction, y = regression_prediction(10, generator=generator), torch.full((10,), 1e6)
    frame = pandas.DataFrame({"a": range(10), "b": [None, *"bcdefghij"], "c": [float("nan"), *map(float, range(9))]})
    most, least = row_listings(prediction, y, frame, range(2, 12), inputs=["c", "b"], count=4)
    assert most.headings[-2:] == ("c", "b") and len(most.rows) == len(least.rows) == 4
    for listing in (most, least):
        for row, line in zip(listing.rows, listing.lines, strict=True):
            assert row[0] == f"line {line}"
            assert row[3].endswith("✗")  # 1e6 is in no interval
            assert row[-1] == ("missing" if line == 2 else "abcdefghij"[line - 2])


def test_listings_of_classes_say_what_was_said_with_what_probability(generator):
    prediction, y = class_prediction(10, generator=generator), torch.arange(10) % 3
    frame = pandas.DataFrame({"a": range(10)})
    for listing in row_listings(prediction, y, frame, range(10), inputs=["a"], classes=("x", "y", "z")):
        for row, place in zip(listing.rows, listing.lines, strict=True):
            label = int(prediction.labels[place])
            assert row[1] == "xyz"[label] and row[2] == f"{prediction.probs[place, label]:.1%}"
            assert row[3] == "xyz"[place % 3] + ("" if label == place % 3 else " ✗")
