from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from knowable.inference.dropout.layer_trace import Place, Site

# operation, its settings, shape of the input, shape of the weight, how the weight takes its inputs
CASES = {
    "linear": (F.linear, {}, (2, 6), (3, 6), Place("w")),
    "linear over tokens": (F.linear, {}, (2, 5, 6), (3, 6), Place("w")),
    "convolution 1d": (F.conv1d, {}, (2, 6, 7), (3, 6, 2), Place("w")),
    "convolution 2d": (F.conv2d, {"padding": 1}, (2, 6, 5, 5), (3, 6, 3, 3), Place("w")),
    "convolution 3d": (F.conv3d, {}, (2, 6, 3, 3, 3), (3, 6, 2, 2, 2), Place("w")),
    "grouped": (F.conv2d, {"groups": 2}, (2, 6, 5, 5), (4, 3, 3, 3), Place("w", groups=2)),
    "depthwise": (F.conv2d, {"groups": 6}, (2, 6, 5, 5), (6, 1, 3, 3), Place("w", groups=6)),
    "transposed": (F.conv_transpose2d, {"stride": 2}, (2, 6, 4, 4), (6, 3, 3, 3), Place("w", axis=0)),
    "transposed, grouped": (F.conv_transpose1d, {"groups": 3}, (2, 6, 4), (6, 2, 3), Place("w", axis=0)),
}


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_mask_on_the_inputs_is_a_mask_on_the_weight(case, repeat, generator):
    operation, settings, x_shape, w_shape, place = CASES[case]
    x = torch.randn(x_shape, generator=generator, dtype=torch.float64)
    weight = torch.randn(w_shape, generator=generator, dtype=torch.float64)
    site = Site((place,), 6 // repeat, 0.5, repeat)
    mask = torch.rand(site.units, generator=generator, dtype=torch.float64)
    channel = -1 if operation is F.linear else 1
    shape = [1] * x.dim()
    shape[channel] = -1
    expected = operation(x * site.on_inputs(mask).view(shape), weight, **settings)
    actual = operation(x, weight * site.on_weight(mask, place, weight), **settings)
    assert torch.allclose(actual, expected, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_many_masks_at_once_are_each_by_itself(case, generator):
    *_, w_shape, place = CASES[case]
    weight = torch.randn(w_shape, generator=generator)
    site = Site((place,), 3, 0.5, 2)
    masks = torch.rand((4, 3), generator=generator)
    together = weight * site.on_weight(masks, place, weight)
    assert together.shape == (4, *w_shape)
    for mask, one in zip(masks, together, strict=True):
        assert torch.equal(weight * site.on_weight(mask, place, weight), one)


@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_most_by_unit_is_over_all_weights_that_the_unit_masks(case, repeat, generator):
    *_, w_shape, place = CASES[case]
    values = torch.rand(w_shape, generator=generator)
    site = Site((place,), 6 // repeat, 0.5, repeat)
    found = site.most_by_unit(values, place)
    for unit, mask in enumerate(torch.eye(site.units)):
        assert found[unit] == (values * site.on_weight(mask, place, values)).max()


def test_neighbours_share_their_mask():
    site = Site((Place("w"),), 2, 0.5, repeat=3)
    assert site.on_inputs(torch.tensor([0.0, 1.0])).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_site_survives_json():
    site = Site((Place("a", 0), Place("b", groups=2)), 4, 0.1, 3, by_example=True)
    assert Site.from_json(json.loads(json.dumps(site.to_json()))) == site
    assert site.name == "a"
