"""Pictures of pixels show the numbers of the prediction, and what is no image is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import knowable as kn
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import InvalidArgument, InvalidData, InvalidType
from knowable.evaluation.pixel_plots import pixel_plot
from knowable.likelihoods.bernoulli import BernoulliPrediction
from knowable.likelihoods.categorical import CategoricalPrediction

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 1, 6, 5, generator=GENERATOR), torch.randint(0, 3, (4, 6, 5), generator=GENERATOR)
EQUAL = torch.full((3,), 1 / 3).log()
CLASSES = CategoricalPrediction(torch.randn(3, 4, 3, 6, 5, generator=GENERATOR).log_softmax(2), EQUAL)
BINARY = BernoulliPrediction(torch.randn(3, 4, 1, 6, 5, generator=GENERATOR), EQUAL)
NUMBERS = RegressionPrediction(
    NormalComponents(torch.randn(3, 4, 6, 5, 1, generator=GENERATOR), torch.tensor(0.5)), EQUAL
)


def pictures(figure) -> dict[str, np.ndarray]:
    """What the first line shows, by title."""
    return {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.get_title()}


def test_classes_are_shown_with_both_uncertainties():
    mask = CLASSES.probs[:, 0] > 0.5
    found = pictures(pixel_plot(CLASSES, X, Y, rows=[2, 0], maps={"mask": mask, "width": CLASSES.probs[:, 1]}))
    expected = {
        "image": X[2, 0], "truth": Y[2], "prediction": CLASSES.labels[2], "aleatoric, nats": CLASSES.aleatoric[2],
        "epistemic, nats": CLASSES.epistemic[2], "mask": mask[2], "width": CLASSES.probs[2, 1],
    }  # fmt: skip
    assert list(found) == list(expected)
    for title, values in expected.items():
        np.testing.assert_allclose(found[title], values.double().numpy(), err_msg=title)


def test_every_class_keeps_its_colour_where_rows_lack_some():
    figure = pixel_plot(CLASSES, y=torch.zeros_like(Y))
    for axes in figure.axes[:2]:
        assert axes.images[0].get_clim() == (0, 2) and axes.images[0].get_cmap().N == 3


def test_yes_and_no_and_numbers_may_have_a_dimension_of_one():
    assert list(pictures(pixel_plot(BINARY))) == ["prediction", "aleatoric, nats", "epistemic, nats"]
    found = pictures(pixel_plot(NUMBERS, y=X[:, 0], rows=3))
    np.testing.assert_allclose(found["mean"], NUMBERS.mean[3, ..., 0].double().numpy())
    total = found["aleatoric std"] ** 2 + found["epistemic std"] ** 2
    np.testing.assert_allclose(total, NUMBERS.variance[3, ..., 0].double().numpy(), rtol=1e-5)


def test_a_single_network_has_no_map_of_epistemic_uncertainty():
    one = CategoricalPrediction(CLASSES.log_probs[:1], torch.zeros(1))
    assert list(pictures(pixel_plot(one))) == ["prediction", "aleatoric, nats"]


def test_images_in_colour_fill_the_range_of_colours():
    colours = 7 * torch.randn(4, 3, 12, 10, generator=GENERATOR)
    picture = pictures(pixel_plot(CLASSES, colours, rows=1))["image"]
    assert picture.shape == (12, 10, 3) and picture.min() == 0 and picture.max() == 1


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "message"),
    [
        ((CLASSES, X[:3]), {}, InvalidData, r"x must have one number for each pixel, \(4, height, width\)"),
        ((CLASSES, X, Y.flatten(1)), {}, InvalidData, "y must have one number for each pixel"),
        ((CLASSES,), {"maps": {"mask": CLASSES.probs}}, InvalidData, r"maps\['mask'\]"),
        ((CLASSES,), {"rows": 4}, InvalidArgument, "rows must be a whole number from 0 to 3|rows must be"),
        ((X,), {}, InvalidType, "prediction must be"),
        ((CategoricalPrediction(torch.zeros(3, 4, 2), EQUAL),), {}, InvalidData, r"prediction\.plot\(\)"),
    ],
)
def test_what_is_no_image_is_refused(arguments, settings, error, message):
    with pytest.raises(error, match=message):
        pixel_plot(*arguments, **settings)


def test_it_is_public():
    assert kn.pixel_plot is pixel_plot
