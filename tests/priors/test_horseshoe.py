from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.errors import InvalidArgument
from knowable.priors import Horseshoe


def _density(w: float, scale: float) -> float:
    return Horseshoe(scale).log_prob(torch.tensor(w, dtype=torch.float64)).exp().item()


@pytest.mark.parametrize("w", [1e-3, 0.1, -0.7, 2.0, -15.0])
def test_log_prob_is_the_normal_averaged_over_the_half_cauchy_scale(w: float):
    scale = 0.6

    def integrand(u: float) -> float:  # lambda = tan(pi u / 2) has the half-Cauchy distribution when u is uniform
        return stats.norm.pdf(w, 0, scale * np.tan(np.pi * u / 2))

    expected = integrate.quad(integrand, 0, 1, limit=500, epsabs=0, epsrel=1e-9)[0]
    assert _density(w, scale) == pytest.approx(expected, rel=1e-6)


def test_the_density_integrates_to_one():
    # The pole at zero is logarithmic: substitute w = exp(t) on each side.
    half = integrate.quad(lambda t: _density(np.exp(t), 0.6) * np.exp(t), -40, 40, limit=400)[0]
    assert 2 * half == pytest.approx(1, abs=1e-7)


def test_gradients_match_finite_differences_and_vmap_equals_the_whole():
    w = torch.tensor([-3.0, 0.05, 0.8, 20.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Horseshoe(0.5).log_prob, w)
    stack = torch.randn(3, 5)
    torch.testing.assert_close(torch.func.vmap(Horseshoe().log_prob)(stack), Horseshoe().log_prob(stack))
    slopes = torch.func.vmap(torch.func.grad(lambda v: Horseshoe().log_prob(v).sum()))(stack)
    assert torch.isfinite(slopes).all() and torch.equal(slopes.sign(), -stack.sign())


def test_a_weight_of_zero_has_a_finite_log_density_and_no_gradient():
    w = torch.zeros(2, requires_grad=True)
    value = Horseshoe().log_prob(w)
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.equal(w.grad, torch.zeros(2))
    assert (value > Horseshoe().log_prob(torch.full((2,), 1e-6))).all()


def test_samples_have_the_priors_quantiles(generator: torch.Generator):
    n, scale = 40_000, 0.6
    drawn = Horseshoe(scale).sample((n,), generator=generator, like=torch.zeros(1, dtype=torch.float64)).abs()
    for point in (0.01, 0.5, 3.0, 100.0):
        inside = 2 * integrate.quad(lambda t: _density(np.exp(t), scale) * np.exp(t), -40, np.log(point), limit=400)[0]
        share = (drawn <= point).double().mean().item()
        assert abs(share - inside) < 4 * (inside * (1 - inside) / n) ** 0.5


def test_it_has_no_closed_forms_and_refuses_a_scale_of_zero():
    assert Horseshoe().normal_moments() is None
    assert Horseshoe().kl_from_normal(torch.zeros(1), torch.ones(1)) is None
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0, got 0"):
        Horseshoe(0.0)
