"""Panels hold the numbers of the predictions they are made from."""

import math

import pytest
import torch
from scipy import stats

from knowable.errors import InvalidArgument, InvalidData
from knowable.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from knowable.report.panels import Axes
from knowable.report.prediction_panels import (
    band_panel,
    coverage_panel,
    curves_panel,
    local_spread,
    noise_panel,
    pictures_panel,
    quantile_line,
    quantile_panel,
    reliability_panel,
)
from tests.interfaces.cases import class_prediction, equal_weights, regression_prediction

AXES = Axes("time", "height")


def test_the_outer_band_of_one_normal_is_its_interval_and_the_inner_one_has_no_width():
    outputs = torch.tensor([[[1.0, 0.0], [2.0, math.log(3.0)]]])  # one draw: N(1, 1) and N(2, 9)
    prediction = HeteroscedasticGaussian().predict(outputs, {}, torch.zeros(1))
    panel = band_panel("t", torch.tensor([[0.0], [1.0]]), prediction, axes=AXES, level=0.8)
    z = stats.norm.ppf(0.9)
    assert panel.low == pytest.approx((1 - z, 2 - 3 * z), abs=1e-4)
    assert panel.high == pytest.approx((1 + z, 2 + 3 * z), abs=1e-4)
    assert panel.epistemic_low == panel.epistemic_high == panel.mean == (1.0, 2.0)


def test_the_inner_band_spans_the_disagreement_of_the_draws():
    outputs = torch.tensor([[[-1.0]], [[3.0]]])  # two draws: mean 1, epistemic variance 4
    prediction = Gaussian(noise=0.5).predict(outputs, {}, equal_weights(2))
    panel = band_panel("t", torch.zeros(1, 1), prediction, axes=AXES, level=0.9)
    assert panel.epistemic_high[0] == pytest.approx(1 + stats.norm.ppf(0.95) * 2, rel=1e-5)
    assert panel.epistemic_low[0] == pytest.approx(1 - stats.norm.ppf(0.95) * 2, rel=1e-5)


def test_local_spread_is_the_root_mean_square_in_bins_of_equal_counts():
    x = torch.tensor([3.0, 1.0, 2.0, 10.0, 12.0, 11.0])
    residuals = torch.tensor([1.0, -2.0, 2.0, 0.0, 3.0, -3.0])
    centre, spread, error = local_spread(x, residuals, 2)
    assert centre == pytest.approx((2.0, 11.0))
    assert spread == pytest.approx((math.sqrt(3.0), math.sqrt(6.0)))
    assert error == pytest.approx((math.sqrt(3.0 / 6), math.sqrt(6.0 / 6)))


def test_more_bins_than_rows_are_refused():
    with pytest.raises(InvalidArgument, match="bins"):
        local_spread(torch.zeros(3), torch.zeros(3), 4)


def test_the_noise_line_is_the_aleatoric_standard_deviation(generator):
    prediction = regression_prediction(8, generator=generator)
    residuals = torch.randn(8, generator=generator)
    x = torch.arange(8.0)
    panel = noise_panel("t", x.unsqueeze(1), prediction, axes=AXES, data_x=x, residuals=residuals, bins=2)
    assert panel.noise == pytest.approx(prediction.aleatoric.sqrt().flatten().tolist())


def test_coverage_of_outcomes_drawn_from_the_prediction_lies_along_the_diagonal(generator):
    prediction = regression_prediction(2000, generator=generator)
    y = prediction.draw(1, generator=generator)[0]
    panel = coverage_panel("t", {"m": [(prediction, y)]})
    (line,) = panel.lines
    assert len(line.x) == 19 and line.x[9] == pytest.approx(0.5)
    # 19 correlated shares, each within 4.5 of its standard errors
    assert all(abs(seen - level) < 4.5 * error for level, seen, error in zip(line.x, line.y, line.error, strict=True))
    assert line.error[9] == pytest.approx(math.sqrt(0.25 / 2000))


def test_coverage_of_several_folds_is_that_of_all_rows(generator):
    near, far = regression_prediction(30, generator=generator), regression_prediction(10, generator=generator)
    folds = [(near, near.mean.flatten()), (far, torch.full((10,), 1e6))]
    (line,) = coverage_panel("t", {"m": folds}).lines
    alone = coverage_panel("t", {"m": folds[:1]}).lines[0]
    assert line.y == pytest.approx([0.75 * share for share in alone.y]) and line.count[0] == 40


def test_coverage_of_far_outcomes_is_zero(generator):
    prediction = regression_prediction(20, generator=generator)
    (line,) = coverage_panel("t", {"m": [(prediction, torch.full((20,), 1e6))]}).lines
    assert set(line.y) == {0.0}


def test_quantiles_count_the_outcomes_below_them_as_the_distribution_function_says(generator):
    y = torch.randn(200, 1, generator=generator)
    prediction = Gaussian(noise=2.0).predict(torch.full((1, 200, 1), 1.0), {}, torch.zeros(1))
    levels = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    line = quantile_line("m", prediction, y, levels)
    bounds = stats.norm(1.0, 2.0).ppf(levels.numpy())
    assert line.y == pytest.approx([(y.flatten().numpy() <= bound).mean() for bound in bounds])
    # predictions that are one too high: more outcomes are below the median than half, Φ(1) = 84%, s.e. 2.6%
    assert abs(line.y[1] - stats.norm.cdf(1.0)) < 4 * 0.026
    assert f"{line.y[1]:.1%} of the outcomes" in quantile_panel("t", {"m": (prediction, y)}).alt


def test_reliability_counts_what_was_right_in_each_bin():
    probs = torch.tensor([[0.95, 0.05], [0.95, 0.05], [0.6, 0.4], [0.4, 0.6]])
    prediction = Categorical().predict(probs.log().unsqueeze(0), {}, torch.zeros(1))
    (line,) = reliability_panel("t", {"m": (prediction, torch.tensor([0, 1, 0, 1]))}, bins=4).lines
    assert line.x == pytest.approx((0.6, 0.95), abs=1e-6)
    assert line.y == (1.0, 0.5)
    assert line.count == (2, 2)
    assert line.error == pytest.approx((math.sqrt(0.24 / 2), math.sqrt(0.95 * 0.05 / 2)), abs=1e-6)


def test_pictures_carry_labels_probabilities_and_the_split(generator):
    prediction = class_prediction(6, generator=generator)
    images = torch.rand(6, 2, 3, generator=generator)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    panel = pictures_panel("t", prediction, [4, 1], images=images, y=y, classes=("a", "b", "c"))
    picture = panel.pictures[0]
    assert (picture.truth, picture.label) == ("b", "abc"[int(prediction.probs[4].argmax())])
    assert [p for _, p in picture.probs] == pytest.approx(prediction.probs[4].tolist())
    assert picture.total == pytest.approx(picture.aleatoric + picture.epistemic, abs=1e-6)
    assert picture.pixels[1] == pytest.approx(images[4, 1].tolist())
    assert picture.largest == pytest.approx(math.log(3))


def test_curves_keep_the_terms_and_leave_out_the_rest():
    records = [
        {"step": 100, "epoch": 1.0, "learning_rate": 0.1, "loss": 3.0, "kl": 7.0, "log_likelihood": -5.0},
        {"step": 200, "epoch": 2.0, "learning_rate": 0.1, "loss": 2.0, "kl": 8.0, "log_likelihood": -4.0},
    ]
    panel = curves_panel("t", {"a": records, "closed form": []})
    ((method, lines),) = panel.groups
    assert method == "a"
    assert [(line.name, line.x, line.y) for line in lines] == [
        ("KL", (1.0, 2.0), (7.0, 8.0)),
        ("log likelihood", (1.0, 2.0), (-5.0, -4.0)),
    ]


def test_several_outcomes_in_a_row_are_refused(generator):
    outputs = torch.randn(3, 5, 2, generator=generator)
    prediction = Gaussian(noise=1.0).predict(outputs, {}, equal_weights(3))
    with pytest.raises(InvalidData, match="one outcome per row"):
        band_panel("t", torch.zeros(5, 1), prediction, axes=AXES)
