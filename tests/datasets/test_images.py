"""Images by formula: masks and pixels follow the probabilities that come with them."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from knowable.datasets import shapes
from knowable.errors import InvalidArgument


def quarters(images: torch.Tensor) -> torch.Tensor:
    """``(n, height, width)`` as ``(4 n, height / 2, width / 2)``."""
    half = images.shape[-1] // 2
    return images.unfold(1, half, half).unfold(2, half, half).flatten(0, 2)


def test_shapes_and_types_and_seeds(seed):
    images = shapes(5, size=24, seed=seed)
    x, y = images
    assert x.shape == (5, 1, 24, 24) and x.dtype == torch.get_default_dtype()
    assert y.shape == (5, 24, 24) and y.dtype == torch.long and y.min() >= 0 and y.max() < len(images.classes) == 3
    assert len(images) == 5
    torch.testing.assert_close(images.probs.sum(1), torch.ones(5, 24, 24))
    again, other = shapes(5, size=24, seed=seed), shapes(5, size=24, seed=seed + 1)
    assert torch.equal(x, again.x) and torch.equal(y, again.y) and not torch.equal(x, other.x)


def test_an_annotator_draws_a_pixel_as_often_as_its_probability_says(seed):
    images = shapes(1500, size=20, seed=seed)
    share, drawn = quarters(1 - images.probs[:, 0]), quarters(images.y) > 0
    some = share.flatten(1).amax(1) > 0
    for wanted in (0.1, 0.5, 0.9):  # of each quarter the pixel that is nearest to it: independent of all others
        place = (share[some].flatten(1) - wanted).abs().argmin(1, keepdim=True)
        p, label = (each[some].flatten(1).gather(1, place).double() for each in (share, drawn))
        assert abs((label - p).sum()) < 4.5 * (p * (1 - p)).sum().sqrt()


def test_borders_are_logistic_along_a_square():
    # across the edge of a square the logit of its probability falls by the same amount at every pixel
    probs = shapes(40, size=32, seed=0).probs[:, 2].double()
    logits = quarters(probs).logit()
    columns = logits[quarters(probs).amax((1, 2)) > 0.9].amax(1)  # along the middle row
    steps = columns[:, 2:] - columns[:, 1:-1]
    rising = (columns[:, 2:] < 3) & (columns[:, 1:-1] > -10) & (steps > 0)  # away from the middle, left of it
    torch.testing.assert_close(steps[rising], torch.full_like(steps[rising], 1 / 0.7), rtol=1e-2, atol=1e-2)


def test_a_mask_is_one_border_around_each_shape():
    images = shapes(50, seed=1)
    share, drawn = quarters(1 - images.probs[:, 0]), quarters(images.y) > 0
    inside = share.masked_fill(~drawn, 2.0).amin((1, 2))  # the least probable pixel of the shape
    outside = share.masked_fill(drawn, -1.0).amax((1, 2))  # the most probable one of the ground
    assert (inside >= outside).all()


def test_pixels_are_normal_around_the_blend(seed):
    images = shapes(60, seed=seed)
    mean = images.probs[:, 1] - images.probs[:, 2]
    std = 0.1 * images.probs[:, 0] + 0.2 * images.probs[:, 1] + 0.4 * images.probs[:, 2]
    z = ((images.x[:, 0] - mean) / std).flatten()[::7]
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-5


@pytest.mark.parametrize("bad", [{"n": 0}, {"size": 15}, {"size": 33}, {"seed": -1}, {"size": 14}])
def test_bad_arguments_are_refused(bad):
    with pytest.raises(InvalidArgument, match=next(iter(bad))):
        shapes(**{"n": 2, **bad})
