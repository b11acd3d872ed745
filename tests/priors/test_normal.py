from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.errors import InvalidArgument, InvalidType
from knowable.priors import Normal


def test_log_prob_matches_scipy():
    w = 3 * torch.randn(50, dtype=torch.float64)
    np.testing.assert_allclose(Normal(0.4, loc=0.5).log_prob(w), stats.norm.logpdf(w.numpy(), 0.5, 0.4), rtol=1e-12)


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


def test_samples_have_the_priors_moments(generator: torch.Generator):
    n = 40_000
    drawn = Normal(2.0, loc=-1.0).sample((n // 4, 4), generator=generator, like=torch.zeros(1, dtype=torch.float64))
    assert drawn.shape == (n // 4, 4) and drawn.dtype == torch.float64
    assert abs(drawn.mean().item() + 1.0) < 4 * 2.0 / n**0.5
    assert abs(drawn.var().item() / 4.0 - 1) < 4 * (2 / n) ** 0.5


def test_moments_are_mean_and_precision():
    assert Normal(0.5, loc=2).normal_moments() == (2.0, 4.0)


def test_vmap_over_values_and_learned_scales_equals_the_loop():
    w, scales = torch.randn(3, 5), torch.rand(3) + 0.1
    batched = torch.func.vmap(lambda v, s: Normal(s).log_prob(v))(w, scales)
    torch.testing.assert_close(
        batched, torch.stack([Normal(float(s)).log_prob(v) for v, s in zip(w, scales, strict=True)])
    )


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0, got 0"):
        Normal(0.0)
    with pytest.raises(InvalidArgument, match="loc must be a finite number"):
        Normal(1.0, loc=math.inf)
    with pytest.raises(InvalidType, match="scale must be a number"):
        Normal("wide")
    with pytest.raises(TypeError):
        Normal(1.0, 0.5)  # loc is keyword-only


def test_a_mean_and_a_scale_for_every_element_match_scipy():
    loc, scale = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.1
    w = torch.randn(6, dtype=torch.float64)
    prior = Normal(scale, loc=loc)
    np.testing.assert_allclose(prior.log_prob(w), stats.norm.logpdf(w.numpy(), loc.numpy(), scale.numpy()), rtol=1e-12)
    each = [
        Normal(float(s), loc=float(m)).kl_from_normal(w[i], scale[0])
        for i, (m, s) in enumerate(zip(loc, scale, strict=True))
    ]
    torch.testing.assert_close(prior.kl_from_normal(w, scale[0].expand(6)), torch.stack(each).sum())
