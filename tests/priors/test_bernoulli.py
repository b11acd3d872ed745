from __future__ import annotations

import math

import pytest
import scipy.stats
import torch

import knowable as kn
from knowable.errors import InvalidArgument
from knowable.priors import BernoulliPrior


@pytest.mark.parametrize("probability", [0.01, 0.5, 0.8])
def test_log_probability_is_that_of_scipy(probability):
    found = BernoulliPrior(probability).log_prob(torch.tensor([0.0, 1.0], dtype=torch.float64))
    expected = scipy.stats.bernoulli(probability).logpmf([0, 1])
    torch.testing.assert_close(found, torch.as_tensor(expected))


def test_what_is_neither_0_nor_1_has_no_probability():
    assert (BernoulliPrior(0.3).log_prob(torch.tensor([0.5, -1.0, 2.0])) == -math.inf).all()


def test_draws_are_zeros_and_ones_in_the_right_proportion(generator):
    # of 20,000 draws, within 4.5 standard errors
    drawn = BernoulliPrior(0.2).sample((200, 100), generator=generator, like=torch.zeros(1, dtype=torch.float64))
    assert drawn.dtype == torch.float64 and set(drawn.unique().tolist()) == {0.0, 1.0}
    assert abs(drawn.mean().item() - 0.2) < 4.5 * math.sqrt(0.2 * 0.8 / 20_000)


def test_a_model_draws_its_gates_from_their_prior(generator):
    model = kn.Model(
        torch.nn.Linear(1, 1), kn.Gaussian(0.1), {"bias": kn.BernoulliPrior(0.5), "*": kn.Normal(1e-9)}, random="*"
    )
    drawn = model.prior_predict(torch.zeros(1, 1), samples=40, generator=generator).samples
    assert ((drawn.abs() < 1e-6) | ((drawn - 1).abs() < 1e-6)).all() and 0 < drawn.mean() < 1


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.5, math.nan])
def test_probabilities_lie_between_0_and_1(probability):
    with pytest.raises(InvalidArgument, match="probability must be a finite number > 0 and < 1"):
        BernoulliPrior(probability)
