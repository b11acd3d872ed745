"""Identities of the split of uncertainty, for every likelihood."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn

DTYPE = torch.float64


class _Gamma(kn.DistributionLikelihood):
    """Positive numbers."""

    def distribution(self, output, params):
        return torch.distributions.Gamma(3.0 + 0 * output, torch.exp(-output))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, x):
        out = self.body(x)
        return {"a": out[:, :1], "b": out[:, 1:]}


ROW, IMAGE = (5, 3), (5, 3, 4, 4)
CASES = {
    "gaussian": (nn.Linear(3, 2), kn.Gaussian(), ROW),
    "heteroscedastic": (nn.Linear(3, 2), kn.HeteroscedasticGaussian(), ROW),
    "student t": (nn.Linear(3, 1), kn.StudentT(), ROW),
    "heteroscedastic student t": (nn.Linear(3, 2), kn.HeteroscedasticStudentT(), ROW),
    "poisson": (nn.Linear(3, 1), kn.Poisson(), ROW),
    "negative binomial": (nn.Linear(3, 1), kn.NegativeBinomial(), ROW),
    "own": (nn.Linear(3, 1), _Gamma(), ROW),
    "categorical": (nn.Linear(3, 4), kn.Categorical(), ROW),
    "bernoulli": (nn.Linear(3, 1), kn.Bernoulli(), ROW),
    "pixels of classes": (nn.Conv2d(3, 4, 3, padding=1), kn.Categorical(), IMAGE),
    "pixels of yes or no": (nn.Conv2d(3, 1, 3, padding=1), kn.Bernoulli(), IMAGE),
    "pixels of numbers": (nn.Conv2d(3, 1, 3, padding=1), kn.Gaussian(), IMAGE),
    "joint": (_Two(), kn.Joint({"a": kn.Gaussian(), "b": kn.Categorical()}), ROW),
}


@pytest.mark.parametrize("case", CASES)
def test_total_is_aleatoric_plus_epistemic_exactly(case: str, generator: torch.Generator):
    net, likelihood, shape = CASES[case]
    x = torch.randn(shape, generator=generator)
    whole = kn.Model(net, likelihood).prior_predict(x, samples=7, generator=generator)
    for prediction in (whole[name] for name in whole) if isinstance(whole, kn.JointPrediction) else (whole,):
        assert torch.equal(prediction.total, prediction.aleatoric + prediction.epistemic)
        assert (prediction.epistemic >= 0).all() and prediction.epistemic.max() > 0
        assert (prediction.aleatoric >= 0).all()
        if case.startswith("pixels"):
            assert prediction.total.shape in ((5, 4, 4), (5, 1, 4, 4))
        if isinstance(prediction, kn.ClassPrediction):
            _check_class_variance(prediction)
            torch.testing.assert_close(prediction.confidence, _slow_confidence(prediction))


def _check_class_variance(prediction: kn.ClassPrediction) -> None:
    """Var 1{y = c} = p (1 - p) = E[p (1 - p)] + Var p."""
    probs, draws = prediction.probs, prediction.samples
    torch.testing.assert_close(probs * (1 - probs), prediction.probs_noise + prediction.probs_variance)
    torch.testing.assert_close(prediction.probs_variance, draws.var(0, correction=0))


def _slow_confidence(prediction: kn.ClassPrediction) -> torch.Tensor:
    probs = prediction.probs
    return torch.maximum(probs, 1 - probs) if probs.shape == prediction.labels.shape else probs.max(1).values


def test_closed_form_averages_have_an_exact_split_too(generator: torch.Generator):
    x = torch.randn((40, 3), generator=generator)
    y = torch.randint(3, (40,), generator=generator)
    posterior = kn.Laplace().fit(kn.Model(nn.Linear(3, 3), kn.Categorical()), (x, y))
    prediction = posterior.predict(x, samples=3)  # few draws, whose entropy may be above that of the average
    assert torch.equal(prediction.total, prediction.aleatoric + prediction.epistemic)
    expected = -(prediction.probs * prediction.probs.log()).sum(1)
    torch.testing.assert_close(prediction.total, expected)
    assert (prediction.epistemic >= 0).all()


def test_with_data_epistemic_goes_to_zero_and_aleatoric_to_the_noise(seed: int):
    """A conjugate model with 4 weights: at a row the epistemic variance is about 4 noise² / N."""
    model = kn.Model(nn.Linear(3, 1).to(DTYPE), kn.Gaussian())
    doubts = []
    for rows in (50, 500, 5000):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((rows, 3), generator=generator, dtype=DTYPE)
        y = x.sum(1, keepdim=True) + 0.3 * torch.randn((rows, 1), generator=generator, dtype=DTYPE)
        prediction = kn.ExactLinear().fit(model, (x, y)).predict(x[:50])
        noise = prediction.aleatoric.mean().item()
        assert abs(noise / 0.09 - 1) < 4 * math.sqrt(2 / rows) + 5 / rows  # of a variance, and of weights and prior
        doubts.append(prediction.epistemic.mean().item() * rows / noise)
    assert all(2 < each < 8 for each in doubts)


@pytest.mark.parametrize("likelihood", [kn.Categorical(), kn.Bernoulli()], ids=["classes", "yes or no"])
def test_mutual_information_is_the_expected_divergence_of_one_more_observation(likelihood, generator: torch.Generator):
    """With finitely many possible weights: Σ_y p(y) KL(p(θ | D, y) ‖ p(θ | D)), by enumeration."""
    binary = isinstance(likelihood, kn.Bernoulli)
    model = kn.Model(nn.Linear(2, 1 if binary else 3).to(DTYPE), likelihood)
    stack = {
        name: 2 * torch.randn((6, *value.shape), generator=generator, dtype=DTYPE)
        for name, value in model.params().items()
    }
    prior = torch.randn(6, generator=generator, dtype=DTYPE).log_softmax(0)
    posterior = kn.Particles(model, stack, prior)
    x = torch.randn((4, 2), generator=generator, dtype=DTYPE)
    found = posterior.predict(x).epistemic.flatten()
    for row in range(4):
        expected = 0.0
        for label in range(2 if binary else 3):
            y = torch.tensor([[float(label)]], dtype=DTYPE) if binary else torch.tensor([label])
            likelihoods = torch.stack(
                [
                    model.log_likelihood({k: v[j] for k, v in stack.items()}, x[row : row + 1], y).squeeze(0)
                    for j in range(6)
                ]
            )
            joint = prior + likelihoods
            after = joint.log_softmax(0)
            expected += (joint.logsumexp(0).exp() * (after.exp() * (after - prior)).sum()).item()
        assert found[row].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
