"""Synthetic problems follow the truth they state."""

import math

import pytest
import torch
from scipy import integrate, stats

from knowable.datasets import blobs, heteroscedastic_sine, linear, sine_with_gap, two_moons
from knowable.errors import InvalidArgument

REGRESSION = [sine_with_gap, heteroscedastic_sine, linear]
CLASSIFICATION = [two_moons, blobs]


@pytest.mark.parametrize("make", REGRESSION + CLASSIFICATION)
def test_the_same_seed_gives_the_same_data_and_another_seed_other_data(make, seed):
    first, again, other = make(50, seed=seed), make(50, seed=seed), make(50, seed=seed + 1)
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)
    assert len(first) == 50


@pytest.mark.parametrize("make", REGRESSION)
def test_standardised_residuals_from_the_truth_are_standard_normal(make, seed):
    data = make(4000, seed=seed)
    z = (data.y - data.truth.mean(data.x)) / data.truth.noise_std(data.x)
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-5  # fails on one seed in 100,000 if the truth holds


@pytest.mark.parametrize("make", CLASSIFICATION)
def test_labels_occur_as_often_as_the_true_probabilities_say(make, seed):
    # Σ (1[y = c] − p_c) has variance at most Σ p_c (1 − p_c): labels are dealt in turn, which only lowers it.
    data = make(4000, noise=0.6, seed=seed)
    probs = data.truth.probs(data.x)
    torch.testing.assert_close(probs.sum(1), torch.ones(4000))
    for label in range(probs.shape[1]):
        sharp = probs[:, label] > 0.7
        p = probs[sharp, label]
        standard_error = (p * (1 - p)).sum().sqrt().item()
        assert abs((data.y[sharp] == label).sum().item() - p.sum().item()) < 4.5 * standard_error


def test_the_gap_is_empty_and_both_sides_are_not(seed):
    x = sine_with_gap(200, seed=seed).x
    assert bool(((x.abs() >= 1) & (x.abs() <= 3)).all())
    assert bool((x < 0).any()) and bool((x > 0).any())


def test_noise_of_the_heteroscedastic_sine_ends_at_the_stated_value():
    std = heteroscedastic_sine(noise=0.3).truth.noise_std(torch.tensor([[-3.0], [3.0]]))
    assert std[1].item() == pytest.approx(0.3)
    assert std[0].item() == pytest.approx(0.3 * (1 + math.exp(-3)) / (1 + math.exp(3)))


def test_least_squares_recovers_the_weights_of_the_linear_problem(seed):
    data = linear(n=400, d=6, noise=0.5, seed=seed)
    estimate = torch.linalg.lstsq(data.x.double(), data.y.double().unsqueeze(1)).solution[:, 0]
    covariance = 0.25 * torch.linalg.inv(data.x.double().T @ data.x.double())
    z = (estimate - data.truth.weights.double()) / covariance.diagonal().sqrt()
    assert z.abs().max() < 5


def test_moon_probabilities_agree_with_numerical_integration():
    # The midpoint rule errs by h²/24 · |f'(π) − f'(0)| <= 3.2e-6 here (h = π/1024, |f'| <= exp(-1/2)/noise), and the
    # integrals it is divided by are above 0.3.
    noise, points = 0.15, [(0.5, 0.25), (0.0, 0.8), (1.0, -0.3), (-0.9, 0.4), (0.5, 0.0)]
    computed = two_moons(noise=noise).truth.probs(torch.tensor(points, dtype=torch.float64))
    for (a, b), row in zip(points, computed, strict=True):

        def density(t, curve, a=a, b=b):
            u, v = curve(t)
            return math.exp(-((a - u) ** 2 + (b - v) ** 2) / (2 * noise**2))

        upper, _ = integrate.quad(density, 0, math.pi, args=(lambda t: (math.cos(t), math.sin(t)),), epsabs=1e-13)
        lower, _ = integrate.quad(
            density, 0, math.pi, args=(lambda t: (1 - math.cos(t), 0.5 - math.sin(t)),), epsabs=1e-13
        )
        assert row[0].item() == pytest.approx(upper / (upper + lower), abs=1.1e-5)


def test_blob_probabilities_are_even_at_the_centre_and_certain_at_a_far_corner():
    probs = blobs(classes=4, noise=0.3).truth.probs(torch.tensor([[0.0, 0.0], [5.0, 0.0]]))
    torch.testing.assert_close(probs[0], torch.full((4,), 0.25))
    assert probs[1, 0].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("make", "arguments", "name"),
    [
        (sine_with_gap, {"n": 0}, "n must be"),
        (heteroscedastic_sine, {"noise": 0.0}, "noise must be"),
        (linear, {"d": 0}, "d must be"),
        (blobs, {"classes": 1}, "classes must be"),
        (two_moons, {"seed": -1}, "seed must be"),
    ],
)
def test_impossible_arguments_are_refused_by_name(make, arguments, name):
    with pytest.raises(InvalidArgument, match=name):
        make(**arguments)
