"""Tests of probabilities averaged over normal logits: numerical integration is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

import knowable as kn
from knowable.core.prediction.components import NormalOutputs
from knowable.likelihoods.bernoulli import moderated
from knowable.likelihoods.categorical import average_log_softmax

DTYPE = torch.float64


@pytest.mark.parametrize("mean", [-3.0, -0.5, 0.0, 1.0, 4.0])
@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_the_averaged_probability_is_that_of_the_integral(mean, std):
    # the probit approximation of the logistic function is known to be within 0.02 of it
    exact, _ = integrate.quad(lambda f: special.expit(f) * stats.norm.pdf(f, mean, std), mean - 9 * std, mean + 9 * std)
    found = moderated(torch.tensor(mean, dtype=DTYPE), torch.tensor(std**2, dtype=DTYPE)).sigmoid().item()
    assert abs(found - exact) < 0.02


def outputs_of(mean: torch.Tensor, draws: int = 4000) -> NormalOutputs:
    size = mean[0].numel()
    factor = 0.5 * torch.randn(len(mean), size, size, dtype=DTYPE)
    return NormalOutputs.of_moments(mean, factor @ factor.mT, torch.randn(draws, size, dtype=DTYPE))


def test_yes_or_no_is_averaged_in_closed_form_and_split_by_draws():
    outputs = outputs_of(torch.randn(5, 3, dtype=DTYPE))
    prediction = kn.Bernoulli().predict_normal(outputs, {})
    logits = outputs.mean / (1 + np.pi / 8 * outputs.variance).sqrt()
    torch.testing.assert_close(prediction.probs, logits.sigmoid())
    plain = kn.Bernoulli().predict(outputs.draws, {}, outputs.log_weights)
    torch.testing.assert_close(prediction.aleatoric, plain.aleatoric)
    assert (prediction.probs - plain.probs).abs().max() < 0.05  # 0.02, and 4000 draws of a probability
    y = torch.randint(0, 2, (5, 3))
    expected = torch.distributions.Bernoulli(logits=logits).log_prob(y.double()).sum(1)
    torch.testing.assert_close(prediction.log_prob(y), expected)
    assert torch.equal(prediction.labels, (logits > 0).long())


@pytest.mark.parametrize("trailing", [(), (2, 2)])
def test_classes_are_averaged_in_closed_form_and_split_by_draws(trailing):
    outputs = outputs_of(torch.randn(4, 3, *trailing, dtype=DTYPE), draws=20_000)
    prediction = kn.Categorical().predict_normal(outputs, {})
    logits = prediction.log_mean_probs
    draws = outputs.draws.softmax(2)
    torch.testing.assert_close(prediction.samples, draws)
    error = draws.std(0) / 20_000**0.5
    assert ((prediction.probs - draws.mean(0)).abs() < 5 * error + 0.003).all()  # 0.003: 256 points of the sequence
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
    torch.testing.assert_close(prediction.total, entropy)
    assert (prediction.epistemic >= -0.01).all()
    y = torch.randint(0, 3, (4, *trailing))
    expected = -torch.nn.functional.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(prediction.log_prob(y), expected.flatten(1).sum(1) if trailing else expected)


def test_without_variance_the_probabilities_are_the_networks():
    mean = torch.randn(4, 3, dtype=DTYPE)
    for covariance in (None, torch.zeros(4, 3, 3, dtype=DTYPE)):
        outputs = NormalOutputs(mean, torch.zeros_like(mean), covariance, mean.unsqueeze(0))
        torch.testing.assert_close(kn.Categorical().predict_normal(outputs, {}).probs, mean.softmax(1))


def test_a_common_shift_of_the_logits_changes_nothing():
    # softmax ignores it: neither its mean nor its variance, nor its correlation with the logits, may count
    outputs = outputs_of(torch.randn(5, 4, 2, dtype=DTYPE), draws=2)
    shift = torch.randn(5, 8, dtype=DTYPE)
    common = torch.eye(2, dtype=DTYPE).repeat(4, 1)  # (outputs, positions): the classes of a position move together
    own = 100.0 * torch.eye(2, dtype=DTYPE)
    crossed = shift.unsqueeze(2) @ torch.ones(5, 1, 2, dtype=DTYPE) @ common.T
    moved = outputs.covariance + crossed + crossed.mT + common @ own @ common.T
    found = average_log_softmax(outputs.mean + 3.0, moved)
    torch.testing.assert_close(found, average_log_softmax(outputs.mean, outputs.covariance))


def _logistic_normal(logit: float, mean: float, std: float) -> float:
    return special.expit(logit) * stats.norm.pdf(logit, mean, std)


@pytest.mark.parametrize("std", [0.5, 2.0, 5.0])
def test_two_classes_have_the_average_of_the_integral(std):
    mean = torch.tensor([[-2.0, 0.0], [0.5, 0.0], [6.0, 1.0]], dtype=DTYPE)
    covariance = torch.tensor([[std**2 + 1.0, 1.0], [1.0, 1.0]], dtype=DTYPE).expand(3, 2, 2)  # std of the difference
    found = average_log_softmax(mean, covariance).exp()[:, 0]
    for value, each in zip(found.tolist(), (mean[:, 0] - mean[:, 1]).tolist(), strict=True):
        exact = integrate.quad(_logistic_normal, each - 9 * std, each + 9 * std, args=(each, std))[0]
        assert abs(value - exact) < 0.002  # 256 points of a Sobol sequence in one dimension


def test_numbers_add_noise_and_variance():
    outputs = outputs_of(torch.randn(4, 2, dtype=DTYPE))
    prediction = kn.Gaussian((0.3, 0.8)).predict_normal(outputs, {})
    noise = torch.tensor([0.09, 0.64], dtype=DTYPE)
    torch.testing.assert_close(prediction.mean, outputs.mean)
    torch.testing.assert_close(prediction.variance, outputs.variance + noise)
    torch.testing.assert_close(prediction.aleatoric, noise.expand(4, 2))
    torch.testing.assert_close(prediction.epistemic, outputs.variance)
    y = torch.randn(4, 2, dtype=DTYPE)
    joint = torch.distributions.MultivariateNormal(outputs.mean, outputs.covariance + noise.diag())
    torch.testing.assert_close(prediction.log_prob(y), joint.log_prob(y))


def test_numbers_whose_covariance_is_not_known_are_a_mixture_of_the_draws():
    outputs = outputs_of(torch.randn(4, 2, dtype=DTYPE), draws=6)
    unknown = NormalOutputs(outputs.mean, outputs.variance, None, outputs.draws)
    found = kn.Gaussian(0.3).predict_normal(unknown, {})
    expected = kn.Gaussian(0.3).predict(outputs.draws, {}, outputs.log_weights)
    y = torch.randn(4, 2, dtype=DTYPE)
    torch.testing.assert_close(found.log_prob(y), expected.log_prob(y))


def test_other_likelihoods_mix_the_draws():
    outputs = outputs_of(torch.randn(4, 1, dtype=DTYPE), draws=6)
    own = {"log_scale": torch.tensor(-0.5, dtype=DTYPE)}
    found = kn.StudentT().predict_normal(outputs, own)
    stack = {"log_scale": torch.full((6,), -0.5, dtype=DTYPE)}
    expected = kn.StudentT().predict(outputs.draws, stack, outputs.log_weights)
    y = torch.randn(4, 1, dtype=DTYPE)
    torch.testing.assert_close(found.log_prob(y), expected.log_prob(y))


@pytest.mark.parametrize("likelihood", [kn.Bernoulli(), kn.Categorical()])
def test_a_mixture_averages_the_closed_forms_of_its_parts(likelihood):
    parts = [likelihood.predict_normal(outputs_of(torch.randn(4, 3, dtype=DTYPE), draws=10), {}) for _ in range(2)]
    weights = torch.tensor([0.3, 0.7], dtype=DTYPE)
    mixed = type(parts[0]).joined(parts, weights.log())
    torch.testing.assert_close(mixed.probs, 0.3 * parts[0].probs + 0.7 * parts[1].probs)
    assert mixed.samples.shape[0] == 20


def test_an_ensemble_of_laplace_fits_predicts_labels():
    x = torch.randn(20, 2)
    model = kn.Model(torch.nn.Linear(2, 3), kn.Categorical())
    posterior = kn.EnsembleOf(kn.Laplace(epochs=5), 2).fit(model, (x, torch.arange(20) % 3))
    torch.testing.assert_close(posterior.predict(x).probs.sum(1), torch.ones(20))
