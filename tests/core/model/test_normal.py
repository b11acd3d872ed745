"""Tests of the normal prior; scipy and torch.distributions are the oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from knowable.core.model.normal import Normal
from knowable.errors import InvalidArgument, InvalidType
from tests.core.cases import DTYPE


def test_the_log_density_is_that_of_scipy():
    value = torch.linspace(-5, 5, 21, dtype=DTYPE)
    expected = stats.norm(loc=0.3, scale=1.7).logpdf(value.numpy())
    np.testing.assert_allclose(Normal(1.7, loc=0.3).log_prob(value), expected, rtol=1e-12)


def test_a_tensor_of_scales_and_locations_acts_elementwise():
    loc, scale = torch.tensor([0.0, 1.0], dtype=DTYPE), torch.tensor([0.5, 2.0], dtype=DTYPE)
    value = torch.tensor([0.3, -0.7], dtype=DTYPE)
    expected = torch.distributions.Normal(loc, scale).log_prob(value)
    torch.testing.assert_close(Normal(scale, loc=loc).log_prob(value), expected)


def test_draws_have_the_right_mean_and_variance(generator):
    # n draws: the mean errs by s / sqrt(n), the variance by s^2 sqrt(2 / (n - 1)); 5 standard errors allowed
    n, scale, loc = 100_000, 1.7, 0.3
    draws = Normal(scale, loc=loc).sample((n,), generator=generator, like=torch.zeros((), dtype=DTYPE))
    assert abs(draws.mean() - loc) < 5 * scale / math.sqrt(n)
    assert abs(draws.var() - scale**2) < 5 * scale**2 * math.sqrt(2 / (n - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_take_shape_and_dtype_from_the_call(dtype):
    drawn = Normal(2.0).sample((3, 2), like=torch.zeros((), dtype=dtype))
    assert drawn.shape == (3, 2)
    assert drawn.dtype == dtype


def test_the_divergence_from_a_normal_is_that_of_torch(generator):
    loc = torch.randn(4, generator=generator, dtype=DTYPE)
    scale = torch.rand(4, generator=generator, dtype=DTYPE) + 0.1
    q, p = torch.distributions.Normal(loc, scale), torch.distributions.Normal(0.3, 1.7)
    expected = torch.distributions.kl_divergence(q, p).sum()
    torch.testing.assert_close(Normal(1.7, loc=0.3).kl_from_normal(loc, scale), expected.to(DTYPE), rtol=1e-6, atol=0)


def test_the_divergence_from_itself_is_zero():
    prior = Normal(1.7, loc=0.3)
    ones = torch.ones(3, dtype=DTYPE)
    assert prior.kl_from_normal(0.3 * ones, 1.7 * ones).item() == pytest.approx(0.0, abs=1e-12)


def test_the_moments_are_mean_and_precision():
    assert Normal(2.0, loc=1.0).normal_moments() == (1.0, 0.25)


@pytest.mark.parametrize(
    ("arguments", "error", "wanted"),
    [
        ({"scale": 0.0}, InvalidArgument, "scale must be a finite number > 0"),
        ({"scale": -1}, InvalidArgument, "scale must be a finite number > 0, got -1"),
        ({"scale": "1"}, InvalidType, "scale must be a number"),
        ({"scale": 1.0, "loc": math.inf}, InvalidArgument, "loc must be a finite number, got inf"),
        ({"scale": 1.0, "loc": None}, InvalidType, "loc must be a number, got NoneType"),
    ],
)
def test_bad_fields_are_refused(arguments, error, wanted):
    with pytest.raises(error, match=wanted):
        Normal(**arguments)
