"""Tests of the distributions that a distilled network predicts, against closed forms and many draws."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch.distributions import Dirichlet, Normal

import knowable as kn
from knowable.decisions.student_likelihoods import (
    DirichletPrediction,
    DirichletStudent,
    GaussianStudent,
    dirichlet_information,
)


def test_the_split_of_a_dirichlet_is_that_of_many_draws(seed):
    torch.manual_seed(seed)
    log_alpha = torch.randn(3, 4, dtype=torch.float64)
    prediction = DirichletPrediction(log_alpha)
    draws = Dirichlet(log_alpha.exp()).sample((20_000,)).clamp_min(1e-300)
    entropies = -(draws * draws.log()).sum(2)
    error = entropies.std(0) / math.sqrt(len(draws))
    assert ((prediction.aleatoric - entropies.mean(0)).abs() < 5 * error).all()
    assert torch.allclose(prediction.probs, log_alpha.exp() / log_alpha.exp().sum(1, keepdim=True))
    assert torch.allclose(prediction.total, prediction.aleatoric + prediction.epistemic)
    spread = draws.std(0) / math.sqrt(64)
    assert ((prediction.samples.mean(0) - prediction.probs).abs() < 6 * spread).all()
    assert torch.equal(prediction.samples, DirichletPrediction(log_alpha).samples)


@pytest.mark.parametrize("log_s", [-5.0, 0.0, 3.0, 10.0, 24.0])
def test_information_keeps_its_digits(log_s):
    import mpmath

    probs = [0.6875, 0.3125 - 2**-13, 2**-13]  # exactly one in binary
    with mpmath.workdps(50):
        s = mpmath.exp(log_s)
        exact = sum(p * (mpmath.digamma(s * p + 1) - mpmath.log(p)) for p in map(mpmath.mpf, probs))
        exact = float(exact - mpmath.digamma(s + 1))
    found = dirichlet_information(
        torch.tensor([probs], dtype=torch.float64).log(), torch.tensor([log_s], dtype=torch.float64)
    )
    assert found.item() == pytest.approx(exact, rel=1e-6, abs=1e-15)


def test_labels_are_drawn_and_scored_with_the_mean_probabilities():
    log_alpha = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 0.0]])
    prediction = DirichletPrediction(log_alpha)
    y = torch.tensor([2, 1])
    assert torch.allclose(prediction.log_prob(y), log_alpha.log_softmax(1)[torch.arange(2), y])
    drawn = prediction.draw(4_000, generator=torch.Generator().manual_seed(0))
    shares = torch.stack([(drawn == c).double().mean(0) for c in range(3)], 1)
    assert drawn.shape == (4_000, 2)
    assert ((shares - prediction.probs).abs() < 5 * (0.25 / 4_000) ** 0.5).all()
    with pytest.raises(kn.InvalidData, match="2 rows"):
        prediction.log_prob(torch.tensor([1]))


def test_pixels_have_a_dirichlet_each():
    log_alpha = torch.randn(2, 3, 4, 5)
    prediction = DirichletPrediction(log_alpha)
    one = DirichletPrediction(log_alpha[:1, :, 2, 3])
    assert prediction.epistemic.shape == (2, 4, 5)
    assert torch.allclose(prediction.epistemic[0, 2, 3], one.epistemic[0])


def test_the_fit_of_a_dirichlet_student_is_its_formula():
    output, probs, log_s = torch.tensor([[0.3, -1.0]]), torch.tensor([[0.6, 0.4]]), torch.tensor([[2.5]])
    found = DirichletStudent(scale=1.5).log_prob(output, torch.cat([probs, log_s], 1), {})
    cross = (probs * output.log_softmax(1)).sum()
    density = Normal(output.logsumexp(1), 1.5).log_prob(log_s[:, 0]) + 0.5 * math.log(2 * math.pi * 1.5**2)
    assert torch.allclose(found, cross + density)


def test_the_fit_of_a_gaussian_student_is_the_expected_log_density(seed):
    """Over draws of means, and of outcomes around them, as Monte Carlo has it."""
    torch.manual_seed(seed)
    mu, a, e = torch.tensor(0.5), torch.tensor(0.3), torch.tensor(0.2)
    output = torch.tensor([[0.1, -0.7, -1.1]])
    means = mu + e.sqrt() * torch.randn(200_000)
    outcomes = means + a.sqrt() * torch.randn(200_000)
    draws = Normal(0.1, math.exp(-0.55)).log_prob(means) + Normal(means, math.exp(-0.35)).log_prob(outcomes)
    found = GaussianStudent().log_prob(output, torch.stack([mu, a, e]).unsqueeze(0), {})
    expected = draws.mean() + math.log(2 * math.pi)
    assert abs(found.item() - expected.item()) < 5 * draws.std().item() / math.sqrt(len(draws))


def test_a_gaussian_student_predicts_a_normal_and_its_split():
    output = torch.tensor([[[1.0, 2.0, -1.0, 0.5, -2.0, 0.0]]])
    prediction = GaussianStudent().predict(output, {}, torch.zeros(1))
    assert torch.allclose(prediction.aleatoric, torch.tensor([[-1.0, 0.5]]).exp())
    assert torch.allclose(prediction.epistemic, torch.tensor([[-2.0, 0.0]]).exp())
    scale = (math.exp(-1.0) + math.exp(-2.0)) ** 0.5
    assert prediction.quantile(0.9)[0, 0].item() == pytest.approx(stats.norm.ppf(0.9, 1.0, scale), abs=1e-5)
