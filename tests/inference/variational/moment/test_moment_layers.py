"""Tests of layers without weights: which rule an operation gets, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import knowable as kn
from knowable.inference.variational.moment import algebra as moments
from knowable.inference.variational.moment.algebra import Moments
from knowable.inference.variational.moment.network import KNOWN, NoRule, apply_rule


def _named(value: object) -> str:
    """A name for a test that is the same in every process."""
    return getattr(value, "__name__", None) or type(value).__name__


@pytest.fixture
def image(generator) -> Moments:
    shape = (2, 3, 6, 6)
    return Moments(
        torch.randn(shape, generator=generator, dtype=torch.float64),
        torch.rand(shape, generator=generator, dtype=torch.float64),
    )


def same(one: Moments, two: Moments) -> None:
    torch.testing.assert_close(one.mean, two.mean)
    torch.testing.assert_close(one.variance, two.variance)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (F.relu, (), {"inplace": True}, lambda x: moments.rectified(x)),
        (torch.relu_, (), {}, lambda x: moments.rectified(x)),
        (F.leaky_relu, (0.2,), {}, lambda x: moments.rectified(x, 0.2)),
        (F.leaky_relu, (), {}, lambda x: moments.rectified(x, 0.01)),
        (torch.tanh, (), {}, lambda x: moments.smooth(torch.tanh, x)),
        (torch.sigmoid, (), {}, lambda x: moments.smooth(torch.sigmoid, x)),
        (F.gelu, (), {"approximate": "tanh"}, lambda x: moments.smooth(lambda z: F.gelu(z, approximate="tanh"), x)),
        (F.silu, (), {"inplace": True}, lambda x: moments.smooth(F.silu, x)),
        (F.elu, (0.5,), {"inplace": False}, lambda x: moments.smooth(lambda z: F.elu(z, 0.5), x)),
        (F.softplus, (2.0, 20.0), {}, lambda x: moments.smooth(lambda z: F.softplus(z, 2.0, 20.0), x)),
        (F.dropout, (), {"p": 0.4, "training": False}, lambda x: x),
        (F.dropout, (0.4, True), {}, lambda x: moments.dropped(x, 0.4)),
        (F.dropout2d, (), {"p": 0.4}, lambda x: moments.dropped(x, 0.4)),
    ],
    ids=_named,
)
def test_elementwise_layer_gets_its_rule(image, func, args, kwargs, expected):
    same(apply_rule(func, (image, *args), kwargs), expected(image))


def test_arithmetic_with_known_numbers_moves_and_stretches(image):
    factor = torch.linspace(-1, 2, 6, dtype=torch.float64)
    cases = [
        (torch.add, (image, 2.0), image.mean + 2, image.variance),
        (torch.Tensor.__rsub__, (image, 1.0), 1 - image.mean, image.variance),
        (torch.sub, (factor, image), factor - image.mean, image.variance),
        (torch.mul, (image, factor), image.mean * factor, image.variance * factor**2),
        (torch.mul, (factor, image), image.mean * factor, image.variance * factor**2),
        (torch.div, (image, 4), image.mean / 4, image.variance / 16),
        (torch.neg, (image,), -image.mean, image.variance),
    ]
    for func, args, mean, variance in cases:
        same(apply_rule(func, args, {}), Moments(mean, variance))


def test_reshaping_keeps_rows_and_covariances(generator):
    mean = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    covariance = torch.eye(6, dtype=torch.float64).expand(2, 6, 6)
    x = Moments(mean, torch.ones_like(mean), covariance)
    found = apply_rule(torch.Tensor.view, (x, 2, 2, 3), {})
    assert found.mean.shape == found.variance.shape == (2, 2, 3)
    assert found.covariance is not None
    back = apply_rule(torch.flatten, (found, 1), {})
    same(back, x)
    with pytest.raises(NoRule, match="rows"):
        apply_rule(torch.flatten, (x,), {})


# --- pooling ---------------------------------------------------------------------------------------------------------


def windows(x: Tensor, size: int, stride: int, gap: int = 1) -> Tensor:
    """All windows, ``(batch, channels, rows, columns, size²)``, by loops."""
    reach = gap * (size - 1) + 1
    count = (x.shape[-1] - reach) // stride + 1
    found = torch.empty(*x.shape[:2], count, count, size**2, dtype=x.dtype)
    for i, j in itertools.product(range(count), repeat=2):
        top, left = i * stride, j * stride
        found[:, :, i, j] = x[:, :, top : top + reach : gap, left : left + reach : gap].flatten(2)
    return found


@pytest.mark.parametrize("settings", [{"stride": 2}, {"stride": 1}, {"divisor_override": 3}], ids=str)
def test_average_pooling_averages_and_divides_variances_twice(image, settings):
    found = apply_rule(F.avg_pool2d, (image, 2), settings)
    stride, divisor = settings.get("stride", 2), settings.get("divisor_override", 4)
    torch.testing.assert_close(found.mean, windows(image.mean, 2, stride).sum(-1) / divisor)
    torch.testing.assert_close(found.variance, windows(image.variance, 2, stride).sum(-1) / divisor**2)


def test_pooling_to_a_size_and_means_over_positions_are_averages(image):
    found = apply_rule(F.adaptive_avg_pool2d, (image, (3, 2)), {})
    torch.testing.assert_close(found.variance, F.avg_pool2d(image.variance, (2, 3)) / 6)
    whole = apply_rule(torch.Tensor.mean, (image, (2, 3)), {})
    torch.testing.assert_close(whole.variance, image.variance.sum((2, 3)) / 36**2)
    line = Moments(image.mean[:, :, 0], image.variance[:, :, 0])
    torch.testing.assert_close(apply_rule(F.avg_pool1d, (line, 3), {}).variance, F.avg_pool1d(line.variance, 3) / 3)


@pytest.mark.parametrize("settings", [{}, {"stride": 1}, {"stride": 1, "dilation": 2}], ids=str)
def test_max_pooling_is_the_greatest_of_each_window(image, settings):
    found = apply_rule(torch.max_pool2d, (image, 2), settings)
    stride, gap = settings.get("stride", 2), settings.get("dilation", 1)
    means, variances = (windows(each, 2, stride, gap).unbind(-1) for each in (image.mean, image.variance))
    expected = moments.greatest([Moments(m, v) for m, v in zip(means, variances, strict=True)])
    same(found, expected)
    assert found.mean.shape == F.max_pool2d(image.mean, 2, **settings).shape


def test_max_pooling_of_nearly_known_values_is_their_maximum(image):
    x = Moments(image.mean, torch.full_like(image.mean, 1e-14))
    found = apply_rule(torch.max_pool2d, (x, 3), {})
    torch.testing.assert_close(found.mean, F.max_pool2d(image.mean, 3), rtol=0, atol=1e-5)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "says"),
    [
        (torch.softmax, (1,), {}, "softmax"),
        (torch.exp, (), {}, "exp"),
        (F.avg_pool2d, (2,), {"padding": 1, "count_include_pad": False}, "different sizes"),
        (F.avg_pool2d, (4,), {"ceil_mode": True}, "different sizes"),
        (F.adaptive_avg_pool2d, (4,), {}, "different sizes"),
        (torch.max_pool2d, (3,), {"padding": 1}, "padding"),
        (torch.Tensor.mean, (), {}, "mean over rows"),
        (torch.Tensor.mean, (0,), {}, "mean over rows"),
        (torch.mul, (torch.ones(2, 2, 3, 6, 6),), {}, "repeats"),
        (torch.div, (2.0,), {"rounding_mode": "floor"}, "rounded"),
        (torch.sub, (2.0,), {"alpha": 3}, "by name"),
    ],
    ids=_named,
)
def test_operation_without_a_rule_is_refused_by_name(image, func, args, kwargs, says):
    with pytest.raises(NoRule, match=says) as caught:
        apply_rule(func, (image, *args), kwargs)
    assert isinstance(caught.value, kn.Unsupported)
    assert KNOWN in str(caught.value)


def test_division_by_random_values_is_refused(image):
    with pytest.raises(NoRule, match="division"):
        apply_rule(torch.div, (2.0, image), {})


def test_arguments_by_name_are_refused_where_they_would_be_missed(image):
    with pytest.raises(NoRule, match="by name"):
        apply_rule(torch.add, (2.0,), {"other": image})
    with pytest.raises(NoRule, match="by name"):
        apply_rule(torch.mul, (image,), {"other": 2.0})
