from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.errors import InvalidArgument
from knowable.priors import Normal, ScaleMixture


def test_log_prob_is_that_of_the_mixture():
    w = torch.cat([torch.linspace(-3, 3, 41), torch.linspace(-0.01, 0.01, 41)]).double()
    expected = np.log(0.3 * stats.norm.pdf(w.numpy(), 0, 1.5) + 0.7 * stats.norm.pdf(w.numpy(), 0, 0.002))
    np.testing.assert_allclose(ScaleMixture(0.3, 1.5, 0.002).log_prob(w), expected, rtol=1e-11)


def test_the_density_integrates_to_one():
    prior = ScaleMixture(0.3, 1.5, 0.01)

    def density(w: float) -> float:
        return prior.log_prob(torch.tensor(w, dtype=torch.float64)).exp().item()

    assert integrate.quad(density, -20, 20, points=[-0.1, -0.03, 0.0, 0.03, 0.1], limit=200)[0] == pytest.approx(
        1, abs=1e-7
    )


def test_equal_scales_give_the_normal_prior():
    w = torch.randn(20, dtype=torch.float64)
    torch.testing.assert_close(ScaleMixture(0.3, 0.5, 0.5).log_prob(w), Normal(0.5).log_prob(w))


def test_gradients_match_finite_differences_and_stay_finite_far_out():
    w = torch.tensor([-1.0, 0.001, 0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ScaleMixture(0.5, 1.0, 0.1).log_prob, w)
    far = torch.tensor([0.0, 10.0, -30.0], requires_grad=True)  # float32: the narrow density underflows
    ScaleMixture().log_prob(far).sum().backward()
    torch.testing.assert_close(far.grad, torch.tensor([0.0, -10.0, 30.0]))


def test_samples_have_the_mixtures_quantiles(generator: torch.Generator):
    n = 40_000
    drawn = ScaleMixture(0.25, 1.0, 0.01).sample((n,), generator=generator, like=torch.zeros(1, dtype=torch.float64))
    for point in (-1.0, -0.01, 0.0, 0.005, 0.5):
        q = 0.25 * stats.norm.cdf(point, 0, 1.0) + 0.75 * stats.norm.cdf(point, 0, 0.01)
        assert abs((drawn <= point).double().mean().item() - q) < 4 * (q * (1 - q) / n) ** 0.5


def test_vmap_over_values_equals_the_whole():
    w = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(ScaleMixture().log_prob)(w), ScaleMixture().log_prob(w))


@pytest.mark.parametrize("field", ["pi", "scale1", "scale2"])
def test_fields_outside_their_range_are_refused_by_name(field: str):
    with pytest.raises(InvalidArgument, match=f"{field} must be a finite number > 0"):
        ScaleMixture(**{field: 0.0})
    with pytest.raises(InvalidArgument, match="pi must be a finite number > 0 and < 1, got 1"):
        ScaleMixture(pi=1.0)
