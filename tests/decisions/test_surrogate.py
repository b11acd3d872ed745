"""Tests of the surrogate: its features are those of the kernel, and its scales are found in data."""

from __future__ import annotations

import math

import pytest
import torch

from knowable.decisions.surrogate import FourierFeatures, best_scales, fit_surrogate


def matern(distance):
    """The Matérn 5/2 kernel."""
    r = math.sqrt(5.0) * distance
    return (1 + r + r.square() / 3) * torch.exp(-r)


def test_products_of_features_are_nearly_the_kernel():
    features = FourierFeatures(2, pairs=20_000, seed=1)
    features.lengths = torch.tensor([0.5, 2.0], dtype=torch.float64)
    x = torch.rand(30, 2, dtype=torch.float64)
    phi = features(x)
    expected = matern(torch.cdist(x / features.lengths, x / features.lengths))
    assert (phi @ phi.T - expected).abs().max() < 6 / math.sqrt(2 * 20_000)


def test_scales_of_the_data_are_found():
    """A function of the first input alone: its length scale is short, the other's long, and the noise is known."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    noise = 0.1 * torch.randn(60, generator=generator, dtype=torch.float64)
    lengths, signal, found = best_scales(FourierFeatures(2), x, torch.sin(8 * x[:, 0]) + noise, None)
    assert lengths[0] < 1.0 and lengths[1] > 2 * lengths[0] and signal > 0.1
    assert 0.1 * (1 - 5 / math.sqrt(120)) < found < 0.1 * (1 + 5 / math.sqrt(120))


def test_predictions_are_those_of_a_gaussian_process_with_the_features_kernel():
    x = torch.rand(15, 3, dtype=torch.float64)
    y = x.sum(1) - 1.5
    posterior = fit_surrogate(x, y, noise=0.05, seed=3)
    features = posterior.model.net[0]
    signal = posterior.model.prior.prior_of("1.weight").normal_moments()[1] ** -0.5
    at = torch.rand(4, 3, dtype=torch.float64)
    a, b = features(x) * signal, features(at) * signal
    gram = a @ a.T + 0.05**2 * torch.eye(15, dtype=torch.float64)
    mean = b @ a.T @ torch.linalg.solve(gram, y)
    variance = (b @ b.T - b @ a.T @ torch.linalg.solve(gram, a @ b.T)).diagonal()
    prediction = posterior.predict(at)
    torch.testing.assert_close(prediction.mean.flatten(), mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(prediction.epistemic.flatten(), variance, rtol=1e-4, atol=1e-8)
    assert posterior.model.likelihood.noise == pytest.approx(0.05)


def test_of_thirty_inputs_the_two_that_count_are_found(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(260, 30, generator=generator, dtype=torch.float64)
    y = torch.sin(5 * x[:, 0]) + torch.cos(4 * x[:, 1])
    y = (y - y[:60].mean()) / y[:60].std()
    posterior = fit_surrogate(x[:60], y[:60], noise=0.0, seed=seed)
    lengths = posterior.model.net[0].lengths
    assert sorted(lengths.argsort()[:2].tolist()) == [0, 1]
    error = posterior.predict(x[60:]).mean.flatten() - y[60:]
    assert error.square().mean() < 0.5  # of a variance of 1
