from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.network.params import Layout
from knowable.testing import LinearGaussian
from tests.inference.variational.family_oracle import best_low_rank, dense_moments, normal_divergence

QUICK = {"epochs": 800, "learning_rate": 0.03}


def divergence(problem: LinearGaussian, posterior: kn.Posterior) -> float:
    loc, covariance = dense_moments(posterior, Layout.of(problem.model().params()))
    return normal_divergence(loc, covariance, problem.mean, problem.precision)


def test_with_enough_rank_it_is_the_posterior(seed):
    # every covariance of D weights is a diagonal plus rank D - 1; 0.05 nats for what 800 steps leave
    problem = LinearGaussian.make(n=30, d=3, noise=0.7, correlation=0.6, seed=seed)
    posterior = kn.LowRankVI(3, **QUICK, kl_gradient="path").fit(problem.model(), problem.data, seed=seed)
    assert isinstance(posterior, kn.LowRankNormal) and posterior.rank == 3
    assert divergence(problem, posterior) < 0.05
    assert abs(posterior.log_evidence - problem.log_evidence) < 4 * posterior.log_evidence.standard_error + 0.05


def moving_together(seed: int) -> LinearGaussian:
    """Rows of the design nearly add up to zero, so that the data hardly know the sum of the weights.

    One direction holds most of that. (Features that go together make weights that go apart: then the best normal of low
    rank often lies at an infinite stretch, which no fit reaches.)
    """
    generator = torch.Generator().manual_seed(seed)
    x, truth, noise = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((30, 4), (4, 1), (30, 1))
    )
    x = x - 0.9 * x.mean(1, keepdim=True)
    return LinearGaussian(x, x @ truth + 0.7 * noise, 0.7, 1.0)


@pytest.mark.slow
def test_fit_is_the_best_of_its_rank(seed):
    # which lies between mean field and the posterior; 0.05 nats for what 1,000 steps leave
    problem = moving_together(seed)
    method = kn.LowRankVI(1, epochs=1000, learning_rate=0.03, draws=8)
    found = divergence(problem, method.fit(problem.model(), problem.data, seed=seed))
    best = best_low_rank(problem.precision, 1)
    assert best < problem.divergence(problem.mean, problem.mean_field_std) - 0.5  # there is something to gain
    assert best - 1e-6 < found < best + 0.05


def test_rank_comes_first_and_is_checked():
    assert kn.LowRankVI(7).rank == kn.LowRankVI(rank=7).rank == 7
    assert repr(kn.LowRankVI(7, epochs=3)) == "LowRankVI(rank=7, epochs=3)"
    with pytest.raises(kn.InvalidArgument, match="rank"):
        kn.LowRankVI(0)


def test_same_seed_same_directions():
    problem = LinearGaussian.make(n=20)
    first, second = (kn.LowRankVI(2, epochs=5).fit(problem.model(), problem.data, seed=4) for _ in range(2))
    assert torch.equal(first.basis, second.basis) and torch.equal(first.basis_variance, second.basis_variance)
