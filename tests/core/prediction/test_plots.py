"""Tests of prediction.plot(): what is drawn is what the prediction says."""

from __future__ import annotations

import builtins
from statistics import NormalDist

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import knowable as kn


@pytest.fixture(scope="module")
def numbers():
    torch.manual_seed(0)
    x = torch.rand(30, 1).double()
    y = x + 0.1 * torch.randn(30, 1).double()
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(1, 1).double(), kn.Gaussian(0.1)), (x, y))
    return posterior.predict(x), x, y


@pytest.fixture(scope="module")
def classes():
    torch.manual_seed(0)
    model = kn.Model(nn.Linear(2, 3), kn.Categorical())
    return model.prior_predict(torch.randn(50, 2), generator=torch.Generator().manual_seed(0))


def labels_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_band_is_the_interval_and_its_inside_the_epistemic_part(numbers):
    prediction, x, y = numbers
    figure = prediction.plot(x, y, level=0.8)
    axes = figure.axes[0]
    order = x.flatten().argsort()
    mean = axes.lines[0].get_xydata()
    np.testing.assert_allclose(mean, torch.cat([x, prediction.mean], 1)[order].numpy())
    total, epistemic = (each.get_paths()[0].get_extents() for each in axes.collections)
    low, high = prediction.interval(0.8)
    np.testing.assert_allclose([total.y0, total.y1], [low.min(), high.max()])
    reach = NormalDist().inv_cdf(0.9) * prediction.epistemic.sqrt()
    np.testing.assert_allclose(
        [epistemic.y0, epistemic.y1], [(prediction.mean - reach).min(), (prediction.mean + reach).max()]
    )
    np.testing.assert_array_equal(axes.lines[1].get_xydata(), torch.cat([x, y], 1).numpy())
    assert labels_of(figure) == ["total, 80% (noise and model)", "epistemic, 80%", "mean", "observed"]


def test_inputs_of_several_columns_are_drawn_against_what_was_observed(numbers):
    prediction, x, y = numbers
    figure = prediction.plot(torch.cat([x, x], 1), y)
    low, high = prediction.interval(0.9)
    share = ((y >= low) & (y <= high)).double().mean()
    assert labels_of(figure)[1] == f"inside its 90% interval: {share:.0%}"
    assert figure.axes[0].get_xlabel() == "observed"


def test_without_inputs_and_outcomes_rows_are_sorted(numbers):
    axes = numbers[0].plot().axes[0]
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), numbers[0].mean.flatten().sort().values.numpy())


def test_each_output_has_a_plot():
    model = kn.Model(nn.Linear(2, 2), kn.Gaussian(0.1))
    prediction = model.prior_predict(torch.randn(5, 2))
    assert len(prediction.plot().axes) == 2
    with pytest.raises(kn.InvalidArgument, match="ax is one plot, and this prediction has 2 outputs"):
        prediction.plot(ax=Figure().add_subplot())


def test_probabilities_of_the_first_rows_fill_the_bars(classes):
    axes = classes.plot().axes[0]
    widths = np.array([bar.get_width() for bar in axes.patches]).reshape(3, 10).T
    np.testing.assert_allclose(widths, classes.probs[:10].numpy(), rtol=1e-6)
    assert axes.texts[0].get_text() == f"{classes.total[0]:.2f} ({classes.epistemic[0]:.2f})"


def test_many_classes_are_drawn_as_a_few_and_the_others():
    prediction = kn.Model(nn.Linear(2, 20), kn.Categorical()).prior_predict(torch.randn(4, 2))
    figure = prediction.plot()
    assert len(labels_of(figure)) == 8 and labels_of(figure)[-1] == "13 others"
    widths = np.array([bar.get_width() for bar in figure.axes[0].patches]).reshape(8, 4)
    np.testing.assert_allclose(widths.sum(0), 1.0, rtol=1e-5)


def test_a_reliability_diagram_has_the_points_of_the_reliability_curve(classes):
    y = torch.randint(3, (50,), generator=torch.Generator().manual_seed(1))
    axes = classes.plot(y=y).axes[0]
    curve = kn.metrics.reliability_curve(classes, y, bins=10)
    there = curve.count > 0
    expected = torch.stack([curve.confidence[there], curve.accuracy[there]], 1)
    np.testing.assert_allclose(axes.collections[1].get_offsets(), expected.numpy(), rtol=1e-6)


def test_a_prediction_of_yes_or_no_has_two_classes():
    prediction = kn.Model(nn.Linear(2, 1), kn.Bernoulli()).prior_predict(torch.randn(4, 2))
    assert labels_of(prediction.plot()) == ["class 0", "class 1"]
    assert prediction.plot(y=torch.tensor([0, 1, 1, 0])).axes[0].get_ylabel() == "accuracy"


def test_axes_of_the_users_are_drawn_in(numbers, classes):
    for plot in (lambda ax: numbers[0].plot(numbers[1], ax=ax), lambda ax: classes.plot(ax=ax)):
        figure = Figure()
        axes = figure.add_subplot()
        assert plot(axes) is figure and axes.has_data()


# --- predictions from the prior --------------------------------------------------------------------------------------


def prior_of(likelihood, inputs: int, outputs: int = 1, rows: int = 30):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator)
    net = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, outputs))
    return x, kn.Model(net, likelihood).prior_predict(x, samples=40, generator=generator)


def test_functions_of_the_prior_are_lines_along_one_input():
    x, prediction = prior_of(kn.Gaussian(0.3), 1)
    figure = prediction.plot(y=x)  # it knows its inputs
    axes, order = figure.axes[0], x.flatten().argsort()
    assert labels_of(figure) == ["outcomes, 90%", "functions drawn from the prior", "mean", "observed"]
    for line, function in zip(axes.lines, prediction.samples[:20], strict=False):
        np.testing.assert_allclose(line.get_ydata(), function.flatten()[order].numpy())
    np.testing.assert_allclose(axes.lines[20].get_ydata(), prediction.mean.flatten()[order].numpy(), rtol=1e-5)
    low, high = prediction.interval(0.9)
    band = axes.collections[0].get_paths()[0].get_extents()
    np.testing.assert_allclose([band.y0, band.y1], [low.min(), high.max()], rtol=1e-5)


def test_probabilities_of_the_prior_are_lines_along_one_input():
    x, prediction = prior_of(kn.Categorical(), 1, 3)
    figure, order = prediction.plot(), x.flatten().argsort()
    assert [axes.get_ylabel() for axes in figure.axes] == [f"probability of class {k}" for k in range(3)]
    np.testing.assert_allclose(figure.axes[2].lines[4].get_ydata(), prediction.samples[4, order, 2].numpy(), rtol=1e-5)
    assert len(prior_of(kn.Bernoulli(), 1)[1].plot().axes) == 1
    with pytest.raises(kn.InvalidArgument, match="this prediction has 3 classes"):
        prediction.plot(ax=Figure().add_subplot())


def test_data_of_the_prior_over_many_inputs_lie_beside_the_observed():
    """Of each draw the outcomes, sorted: with the noise, here so large that nothing else counts."""
    _, prediction = prior_of(kn.Gaussian(1e4), 3, rows=4_000)
    figure = prediction.plot(y=torch.arange(4_000.0))
    values, shares = figure.axes[0].lines[0].get_data()
    assert np.std(values) == pytest.approx(1e4, rel=0.06) and shares[-1] == 1.0
    np.testing.assert_array_equal(figure.axes[0].lines[20].get_xdata(), np.arange(4_000))
    assert labels_of(figure) == ["data drawn from the prior", "observed"]


def test_confidence_of_the_prior_stands_beside_its_average():
    _, prediction = prior_of(kn.Categorical(), 3, 4)
    average, each = prediction.plot().axes
    assert average.get_xlabel() == "probability"
    np.testing.assert_allclose(each.lines[7].get_xdata(), prediction.samples[7].amax(1).sort().values, rtol=1e-5)


def test_every_kind_of_prior_prediction_has_a_plot():
    for likelihood in (kn.StudentT(), kn.Poisson(), kn.HeteroscedasticGaussian()):
        for inputs in (1, 3):
            assert prior_of(likelihood, inputs, 2)[1].plot().axes
    x = torch.linspace(-1, 1, 9).unsqueeze(1)
    joint = kn.Joint({"a": kn.Gaussian(0.1), "b": kn.Categorical()})
    heads = {"a": lambda out: out[:, :1], "b": lambda out: out[:, 1:]}
    both = kn.Model(nn.Linear(1, 4), joint, output=heads).prior_predict(x)
    assert "functions drawn from the prior" in labels_of(both["a"].plot()) and len(both["b"].plot().axes) == 3


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"x": torch.zeros(3, 1)}, r"x must have 30 rows, one for each prediction; got shape \(3, 1\)"),
        ({"y": torch.zeros(3, 1)}, "y must have 30 rows"),
        ({"level": 1.5}, "level must be a finite number > 0 and < 1"),
    ],
)
def test_what_does_not_fit_is_refused(numbers, arguments, wanted):
    with pytest.raises(kn.KnowableError, match=wanted):
        numbers[0].plot(**arguments)


def test_labels_of_another_shape_are_refused(classes):
    with pytest.raises(kn.InvalidData, match=r"y must have the shape \(50,\) of the labels"):
        classes.plot(y=torch.zeros(3))


def test_a_missing_matplotlib_is_named(monkeypatch, numbers):
    load = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(kn.MissingExtra, match=r"knowable\[report\]"):
        numbers[0].plot()
