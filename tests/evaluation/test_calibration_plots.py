from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.prediction.components import NormalComponents
from knowable.likelihoods.categorical import CategoricalPrediction

from .cases import DTYPE, classes, normals


@pytest.fixture
def labelled(generator):
    logits = torch.randn(1, 200, 3, dtype=DTYPE, generator=generator)
    y = torch.multinomial(logits[0].softmax(1), 1, generator=generator).squeeze(1)
    return classes((2 * logits).softmax(2)), y


def test_diagrams_of_classes_show_the_curves(labelled):
    prediction, y = labelled
    for binning in ("width", "mass"):
        curve = kn.metrics.reliability_curve(prediction, y, 10, binning=binning)
        axes = kn.reliability_diagram(prediction, y, binning=binning).axes[0]
        shown = torch.as_tensor(axes.collections[-1].get_offsets().data)
        there = curve.count > 0
        torch.testing.assert_close(shown, torch.stack([curve.confidence[there], curve.accuracy[there]], 1))
    axes = kn.rejection_plot(prediction, y).axes[0]
    curve = kn.metrics.accuracy_rejection(prediction, y)
    line = next(each for each in axes.lines if each.get_label() == "by uncertainty")
    torch.testing.assert_close(torch.as_tensor(line.get_ydata()), curve.accuracy)
    best = next(each for each in axes.lines if each.get_label().startswith("best"))
    perfect = kn.metrics.accuracy_rejection(prediction, y, uncertainty=(prediction.labels != y).double())
    torch.testing.assert_close(torch.as_tensor(best.get_ydata()), perfect.accuracy)


def test_plots_of_numbers_show_the_curves(generator):
    loc = torch.randn(2, 100, dtype=DTYPE, generator=generator)
    prediction, y = normals(loc, torch.ones_like(loc)), torch.randn(100, dtype=DTYPE, generator=generator)
    bars = kn.pit_plot(prediction, y, bins=5).axes[0].containers[0]
    heights = torch.tensor([bar.get_height() for bar in bars], dtype=DTYPE)
    torch.testing.assert_close(heights, kn.metrics.pit_histogram(prediction, y, bins=5).share)
    line = kn.coverage_plot(prediction, y).axes[0].lines[-1]
    found = kn.metrics.coverage_curve(prediction, y, torch.as_tensor(line.get_xdata())).coverage
    torch.testing.assert_close(torch.as_tensor(line.get_ydata()), found)


def test_images_have_maps(generator):
    logits = torch.randn((4, 5, 3, 6, 7), generator=generator)
    pixels = CategoricalPrediction(logits.log_softmax(2), torch.zeros(4).log_softmax(0))
    figure = pixels.plot()
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert len(images) == 9  # three rows of labels, aleatoric and epistemic part
    torch.testing.assert_close(torch.as_tensor(images[0].data), pixels.labels[0].double())
    torch.testing.assert_close(torch.as_tensor(images[3].data), pixels.aleatoric[0].double())
    assert len(pixels.plot(y=pixels.labels).axes[0].images) == 0  # a reliability diagram
    loc = torch.randn((4, 2, 1, 6, 7), generator=generator)
    numbers = kn.RegressionPrediction(NormalComponents(loc, torch.ones_like(loc)), torch.zeros(4).log_softmax(0))
    images = [axes.images[0].get_array() for axes in numbers.plot(y=loc[0, :, 0]).axes if axes.images]
    assert len(images) == 8
    torch.testing.assert_close(torch.as_tensor(images[6].data), numbers.epistemic[0, 0].double().sqrt())
    with pytest.raises(kn.InvalidData, match="shape"):
        numbers.plot(y=loc[0, :1])
