"""Tests of the normal prior; scipy and torch.distributions are the oracles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.core.model.prior import Normal, check_scale, log_of
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


def test_kl_from_normal_matches_numerical_integration():
    prior, loc, scale = Normal(0.7, loc=-0.3), [0.5, -1.0, 0.0], [0.2, 1.5, 0.9]
    expected = 0.0
    for m, s in zip(loc, scale, strict=True):
        q, p = stats.norm(m, s), stats.norm(-0.3, 0.7)
        expected += integrate.quad(lambda w, q=q, p=p: q.pdf(w) * (q.logpdf(w) - p.logpdf(w)), m - 10 * s, m + 10 * s)[
            0
        ]
    found = prior.kl_from_normal(torch.tensor(loc, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64))
    assert found.shape == () and found.item() == pytest.approx(expected, abs=1e-8)
    itself = prior.kl_from_normal(torch.full((5,), -0.3), torch.full((5,), 0.7))
    assert itself.item() == pytest.approx(0, abs=1e-6)


def test_gradients_match_finite_differences_also_in_a_learned_scale():
    loc, w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    scale = (torch.rand(4, dtype=torch.float64) + 0.5).requires_grad_()
    learned = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, s, t: Normal(t, loc=0.1).kl_from_normal(m, s), (loc, scale, learned))
    assert torch.autograd.gradcheck(lambda v, t: Normal(t).log_prob(v), (w, learned))


def test_vmap_over_values_and_learned_scales_equals_the_loop():
    w, scales = torch.randn(3, 5), torch.rand(3) + 0.1
    batched = torch.func.vmap(lambda v, s: Normal(s).log_prob(v))(w, scales)
    torch.testing.assert_close(
        batched, torch.stack([Normal(float(s)).log_prob(v) for v, s in zip(w, scales, strict=True)])
    )


def test_a_positive_number_becomes_a_float():
    assert check_scale("scale", 2) == 2.0
    assert type(check_scale("scale", 2)) is float


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_and_finite_is_refused(value):
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0, got"):
        check_scale("scale", value)


def test_a_scale_that_is_not_a_number_is_refused():
    with pytest.raises(InvalidType, match="scale must be a number, got str"):
        check_scale("scale", "wide")


def test_a_learned_scale_passes_as_the_same_tensor():
    scale = torch.tensor(0.3, requires_grad=True).exp()
    assert check_scale("scale", scale) is scale


def test_the_logarithm_is_of_the_same_kind_as_the_scale():
    assert log_of(2.0) == math.log(2.0)
    assert torch.equal(log_of(torch.tensor(2.0)), torch.tensor(2.0).log())
