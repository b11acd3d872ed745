from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.inference.variational.low_rank import FactorTerms
from tests.inference.variational.family_oracle import (
    Bag,
    check_against_dense,
    check_gradient_of_terms,
    check_start,
    layout_of,
    model_of,
    moved,
)


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
