from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.low_rank import FactorTerms
from knowable.testing import LinearGaussian
from tests.inference.variational.family_oracle import (
    Bag,
    best_low_rank,
    check_against_dense,
    check_gradient_of_terms,
    check_start,
    dense_moments,
    layout_of,
    model_of,
    moved,
    normal_divergence,
)

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


# --- low rank family -------------------------------------------------------------------------------------------------


def build(rank: int = 2):
    model = model_of(Bag(a=(2, 2), b=(1,)))
    layout = layout_of(model)
    loc = layout.flatten(model.params())
    return model, loc, kn.families.LowRank(rank).build(layout, loc, 0.3)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_it_is_a_normal_with_a_diagonal_and_some_directions(seed, rank):
    model, _, module = build(rank)
    moved(module, seed)
    scale = module.log_scale.detach().exp()
    factor = scale.unsqueeze(1) * module.factor.detach().T  # F, (D, k)
    covariance = scale.square().diag() + factor @ factor.T
    check_against_dense(module, model, module.loc.detach(), covariance, seed)
    posterior = module.posterior(model)
    assert isinstance(posterior, kn.LowRankNormal) and posterior.rank == rank


def test_it_starts_where_it_is_told_and_not_at_a_saddle_point():
    _, loc, module = build()
    check_start(module, loc, 0.3)
    assert (module.factor != 0).all()


def test_terms_in_one_call_have_the_same_gradient(seed):
    check_gradient_of_terms(moved(build()[2], seed), seed)


def test_gradient_written_by_hand_is_that_of_finite_differences(seed):
    torch.manual_seed(seed)
    factor = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    along = torch.randn(3, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda value: FactorTerms.apply(value, along), factor)


def test_there_are_no_more_directions_than_weights():
    assert build(rank=40)[2].factor.shape == (5, 5)


@pytest.mark.parametrize("rank", [0, 1.5, "few"], ids=repr)
def test_rank_must_be_a_count(rank):
    with pytest.raises(kn.KnowableError, match="rank"):
        kn.families.LowRank(rank)
