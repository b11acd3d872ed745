from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from knowable.errors import InvalidArgument
from knowable.priors import LaplacePrior
from knowable.priors.laplace import mean_absolute


def test_log_prob_matches_scipy():
    w = 3 * torch.randn(50, dtype=torch.float64)
    np.testing.assert_allclose(LaplacePrior(0.4).log_prob(w), stats.laplace.logpdf(w.numpy(), 0, 0.4), rtol=1e-12)


def test_the_mean_of_the_folded_normal_matches_scipy():
    loc, scale = (
        torch.tensor([0.0, 1.0, -30.0], dtype=torch.float64),
        torch.tensor([0.5, 2.0, 0.1], dtype=torch.float64),
    )
    expected = stats.foldnorm.mean(np.abs(loc.numpy()) / scale.numpy(), scale=scale.numpy())
    np.testing.assert_allclose(mean_absolute(loc, scale), expected, rtol=1e-10)


def test_kl_from_normal_matches_numerical_integration():
    loc, scale = [0.5, -1.0, 0.0], [0.2, 1.5, 0.9]
    expected = 0.0
    for m, s in zip(loc, scale, strict=True):
        q, p = stats.norm(m, s), stats.laplace(0, 0.7)

        def integrand(w: float, q=q, p=p) -> float:
            return q.pdf(w) * (q.logpdf(w) - p.logpdf(w))

        expected += integrate.quad(integrand, m - 10 * s, m + 10 * s, points=[0.0])[0]
    found = LaplacePrior(0.7).kl_from_normal(
        torch.tensor(loc, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64)
    )
    assert found.shape == () and found.item() == pytest.approx(expected, abs=1e-8)


def test_gradients_match_finite_differences_also_in_a_learned_scale():
    loc, w = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    scale = (torch.rand(4, dtype=torch.float64) + 0.5).requires_grad_()
    learned = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, s, b: LaplacePrior(b).kl_from_normal(m, s), (loc, scale, learned))
    assert torch.autograd.gradcheck(lambda v, b: LaplacePrior(b).log_prob(v), (w, learned))


def test_samples_have_the_priors_quantiles(generator: torch.Generator):
    n = 40_000
    drawn = LaplacePrior(2.0).sample((n,), generator=generator, like=torch.zeros(1, dtype=torch.float64))
    assert abs(drawn.mean().item()) < 4 * (8 / n) ** 0.5  # variance 2 b²
    for q in (0.01, 0.3, 0.5, 0.9):
        below = (drawn <= stats.laplace.ppf(q, scale=2.0)).double().mean().item()
        assert abs(below - q) < 4 * (q * (1 - q) / n) ** 0.5


def test_vmap_over_values_and_learned_scales_equals_the_loop():
    w, scales = torch.randn(3, 5), torch.rand(3) + 0.1
    batched = torch.func.vmap(lambda v, s: LaplacePrior(s).log_prob(v))(w, scales)
    loop = [LaplacePrior(float(s)).log_prob(v) for v, s in zip(w, scales, strict=True)]
    torch.testing.assert_close(batched, torch.stack(loop))


def test_it_is_not_normal_and_refuses_a_negative_scale():
    assert LaplacePrior().normal_moments() is None
    with pytest.raises(InvalidArgument, match="scale must be a finite number > 0, got -1"):
        LaplacePrior(-1.0)
