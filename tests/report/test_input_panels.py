"""Predictions along one input at a time."""

from statistics import NormalDist

import numpy as np
import pandas
import pytest

from knowable.report.input_panels import dependence_panel, grid_of
from tests.report.fitted import NOISE, class_fit, linear_fit


def background(frame, seed):
    chosen = np.random.default_rng(seed).choice(len(frame), min(40, len(frame)), replace=False)
    return frame.iloc[np.sort(chosen)]


def test_along_an_input_of_a_linear_model_the_mean_is_a_line_and_the_variances_are_averages():
    fitted = linear_fit(noise=NOISE / linear_fit().outcomes.std)  # in the outcome's unit: NOISE
    frame = fitted.inputs
    panel = dependence_panel(fitted.predict, frame, "a", kind="numeric", target="height", level=0.8, seed=1)
    rows, z = background(frame, 1), NormalDist().inv_cdf(0.9)
    for x, mean, noise, doubt, low in zip(
        panel.x, panel.responses[0].mean, panel.aleatoric, panel.epistemic, panel.low, strict=True
    ):
        prediction = fitted.predict(rows.assign(a=x))
        assert mean == pytest.approx(prediction.mean.mean().item(), abs=1e-5)
        assert doubt**2 == pytest.approx(prediction.epistemic.mean().item(), rel=1e-4)
        assert noise == pytest.approx(NOISE, rel=1e-5)
        assert low == pytest.approx(mean - z * np.hypot(noise, doubt), abs=1e-6)
    steps = np.diff(panel.responses[0].mean) / np.diff(panel.x)
    assert np.ptp(steps) < 1e-3 and steps[0] == pytest.approx(2.0, abs=0.3)
    assert len(panel.x) == 25 and panel.unit == "sd" and "along a" in panel.alt


def test_probabilities_along_a_category_are_those_of_each_value():
    fitted = class_fit()
    frame = fitted.inputs
    panel = dependence_panel(
        fitted.predict, frame, "group", kind="categorical", target="side", classes=fitted.classes, seed=0
    )
    rows = background(frame, 0)
    assert set(panel.categories) == {"one", "two", "three"} and panel.x == (0.0, 1.0, 2.0)
    (response,) = panel.responses
    assert response.name == "P(side = right)"
    for name, mean, noise in zip(panel.categories, response.mean, panel.aleatoric, strict=True):
        prediction = fitted.predict(rows.assign(group=name))
        assert mean == pytest.approx(prediction.probs[:, 1].double().mean().item(), abs=1e-5)
        assert noise == pytest.approx(prediction.aleatoric.double().mean().item(), abs=1e-5)
    assert all(
        0 <= low <= mean <= high <= 1
        for low, mean, high in zip(response.low, response.mean, response.high, strict=True)
    )
    assert panel.low == () and panel.unit == "nats"


def test_numbers_are_spread_over_their_middle_and_few_values_are_taken_as_they_are():
    values = pandas.Series([*np.linspace(0, 1, 500), 1e9, None])
    grid = grid_of(values, "numeric", "n")
    assert len(grid.x) == 25 and 0 <= grid.x[0] < 0.05 and 0.95 < grid.x[-1] <= 1.0
    assert grid_of(pandas.Series([3, 1, 2, 2, None]), "numeric", "n").values == (1.0, 2.0, 3.0)
    mostly = grid_of(pandas.Series([0.0] * 990 + list(range(1, 11))), "numeric", "n")
    assert (mostly.x[0], mostly.x[-1]) == (0.0, 10.0)


def test_dates_are_written_as_the_table_writes_them_and_drawn_in_years():
    texts = grid_of(pandas.Series(["2020-01-01", "2021-01-01", None, "2020-06-01"]), "date", "day")
    assert texts.values[0] == "2020-01-01 00:00:00" and texts.x[0] == 2020.0 and texts.x[-1] == 2021.0
    stamps = grid_of(pandas.Series(pandas.to_datetime(["2020-01-01", "2022-01-01"])), "date", "day")
    assert isinstance(stamps.values[0], pandas.Timestamp) and len(stamps.values) == 25


def test_categories_are_the_most_frequent_first_and_booleans_are_two():
    grid = grid_of(pandas.Series(["b", "a", "b", None, "c", "c", "b"]), "categorical", "t")
    assert grid.categories == ("b", "c", "a") and grid.values == ("b", "c", "a")
    assert set(grid_of(pandas.Series([True, False, True]), "boolean", "t").values) == {True, False}


@pytest.mark.parametrize("values", [[1.0, 1.0], [None, None]])
def test_an_input_with_one_value_has_no_curve(values):
    fitted = linear_fit()
    frame = fitted.inputs.assign(a=values[0])
    assert dependence_panel(fitted.predict, frame, "a", kind="numeric", target="y") is None
