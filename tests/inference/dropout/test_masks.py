from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Bernoulli

from knowable.inference.dropout.masks import entropy, hard_mask, log_probability, relaxed_mask
from tests.inference.dropout.oracle import relaxed_moments

RATES = [0.02, 0.3, 0.8]


def logit(rate: float) -> torch.Tensor:
    return torch.tensor(rate, dtype=torch.float64).logit()


@pytest.mark.parametrize("rate", RATES)
def test_hard_masks_drop_at_their_rate(seed, rate):
    mask = hard_mask(500, 80, rate, like=torch.zeros((), dtype=torch.float64))
    assert mask.dtype == torch.float64 and mask.shape == (500, 80)
    assert ((mask == 0) | (mask == 1)).all()
    assert abs((mask == 0).double().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("relaxation", [0.1, 0.5])
def test_relaxed_masks_have_the_moments_of_their_integral(seed, rate, relaxation):
    mask = relaxed_mask(500, 80, logit(rate), relaxation) / (1 - rate)
    mean, variance = relaxed_moments(rate, relaxation)
    n = mask.numel()
    assert abs(mask.mean() - mean) < 5 * math.sqrt(variance / n)
    spread = (mask - mean).square()
    assert abs(spread.mean() - variance) < 5 * spread.std() / math.sqrt(n)


@pytest.mark.parametrize("rate", RATES)
def test_relaxed_masks_fall_on_the_side_where_hard_ones_would_be(seed, rate):
    mask = relaxed_mask(500, 80, logit(rate), 0.1)
    dropped = (mask < 0.5).double().mean()
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / mask.numel())


def test_relaxed_masks_become_hard_ones(seed):
    mask = relaxed_mask(500, 80, logit(0.3), 1e-4)
    between = ((mask > 0.01) & (mask < 0.99)).double().mean()
    # the noise must lie within 1e-4 * log(99) of the threshold, where its density is p (1 - p)
    assert between < 2 * 2 * 1e-4 * math.log(99) * 0.3 * 0.7 + 1e-3


def test_relaxed_masks_have_a_gradient_in_the_rate_and_hard_ones_have_none(seed):
    where = logit(0.3).requires_grad_()
    relaxed_mask(10, 10, where, 0.1).sum().backward()
    assert where.grad is not None and where.grad < 0  # a larger rate keeps less
    assert not hard_mask(10, 10, 0.3, like=where).requires_grad


@pytest.mark.parametrize("rate", RATES)
def test_log_probabilities_and_entropy_are_those_of_a_bernoulli(seed, rate):
    mask = hard_mask(20, 7, rate, like=logit(rate))
    law = Bernoulli(probs=torch.tensor(1 - rate, dtype=torch.float64))
    assert torch.allclose(log_probability(mask, logit(rate)), law.log_prob(mask).sum(-1))
    assert torch.allclose(entropy(logit(rate)), law.entropy())
    where = logit(rate).requires_grad_()
    torch.autograd.gradcheck(entropy, where)


def test_extreme_rates_stay_finite():
    for where in (-80.0, 80.0):
        value = torch.tensor(where, requires_grad=True)
        (entropy(value) + log_probability(torch.ones(3), value) * 0).backward()
        assert torch.isfinite(entropy(value)) and torch.isfinite(value.grad)
