from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.prediction.components import CorrelatedNormal
from knowable.inference.exact.linear import LinearNormal
from knowable.testing import LinearGaussian


class SharedSlope(nn.Module):
    """Two outputs that share a weight: f = (a x, 2 a x + b)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a * x, 2 * self.a * x + self.b], dim=1)


@pytest.fixture
def shared(seed) -> tuple[LinearNormal, Tensor]:
    x = torch.randn(6, 1, dtype=torch.float64)
    y = torch.cat([x, 2 * x + 1], 1) + 0.5 * torch.randn(6, 2, dtype=torch.float64)
    posterior = kn.ExactLinear().fit(kn.Model(SharedSlope().double(), kn.Gaussian((0.5, 0.8))), (x, y))
    return posterior, torch.randn(4, 1, dtype=torch.float64)


def row_covariances(posterior: LinearNormal, x: Tensor) -> Tensor:
    """J Σ Jᵀ + noise², by hand for the network above, ``(rows, 2, 2)``."""
    design = torch.zeros(len(x), 2, 2, dtype=torch.float64)  # (rows, outputs, [a, b])
    design[:, 0, 0], design[:, 1, 0], design[:, 1, 1] = x[:, 0], 2 * x[:, 0], 1.0
    return design @ posterior.covariance @ design.mT + torch.tensor([0.25, 0.64], dtype=torch.float64).diag()


def test_prediction_is_the_closed_form(seed):
    problem = LinearGaussian.make(seed=seed)
    x = torch.randn(10, 3, dtype=torch.float64)
    prediction = kn.ExactLinear().fit(problem.model(), problem.data).predict(x)
    mean, std = problem.predictive(x)
    torch.testing.assert_close(prediction.mean[:, 0], mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(prediction.std[:, 0], std, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(prediction.aleatoric, torch.full((10, 1), problem.noise**2, dtype=torch.float64))
    torch.testing.assert_close(prediction.epistemic[:, 0], std**2 - problem.noise**2, rtol=1e-8, atol=1e-10)
    y = torch.randn(10, 1, dtype=torch.float64)
    exact = scipy.stats.norm(mean.numpy(), std.numpy())
    np.testing.assert_allclose(prediction.log_prob(y), exact.logpdf(y[:, 0]), rtol=1e-9)
    np.testing.assert_allclose(prediction.quantile(0.1)[:, 0], exact.ppf(0.1), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(prediction.cdf(y)[:, 0], exact.cdf(y[:, 0]), rtol=1e-8, atol=1e-10)


def test_prediction_with_learned_noise_uses_it(seed):
    problem = LinearGaussian.make(seed=seed, noise=0.3)
    posterior = kn.ExactLinear().fit(kn.Model(problem.model().net, kn.Gaussian()), problem.data)
    noise = posterior.points["likelihood.log_noise"].exp().item()
    expected = torch.full((5, 1), noise**2, dtype=torch.float64)
    torch.testing.assert_close(posterior.predict(problem.x[:5]).aleatoric, expected)


def test_samples_are_functions_drawn_from_the_posterior(seed):
    # over S draws: mean within 4 std/sqrt(S), variance within 4 sqrt(2/(S-1)) of itself
    problem = LinearGaussian.make(seed=seed)
    x, draws = torch.randn(3, 3, dtype=torch.float64), 4000
    prediction = kn.ExactLinear().fit(problem.model(), problem.data, seed=seed).predict(x, samples=draws)
    mean, std = problem.predictive(x)
    spread = (std**2 - problem.noise**2).sqrt()
    found = prediction.samples[:, :, 0]
    assert found.shape == (draws, 3)
    assert ((found.mean(0) - mean).abs() < 4 * spread / math.sqrt(draws)).all()
    assert ((found.var(0) / spread**2 - 1).abs() < 4 * math.sqrt(2 / (draws - 1))).all()


def test_streamed_prediction_is_exact_too(seed):
    problem = LinearGaussian.make(seed=seed)
    posterior = kn.ExactLinear().fit(problem.model(), problem.data)
    parts = list(posterior.predict_stream(problem.x, max_memory=64 * 8 * 40))
    assert len(parts) > 1
    mean, std = problem.predictive(problem.x)
    torch.testing.assert_close(torch.cat([part.mean for part in parts])[:, 0], mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(torch.cat([part.std for part in parts])[:, 0], std, rtol=1e-8, atol=1e-9)


def test_outputs_of_a_row_are_correlated_as_their_shared_weights_say(shared):
    posterior, x = shared
    prediction, y = posterior.predict(x), torch.randn(4, 2, dtype=torch.float64)
    covariance = row_covariances(posterior, x)
    torch.testing.assert_close(prediction.variance, covariance.diagonal(dim1=1, dim2=2), rtol=1e-8, atol=1e-10)
    expected = [
        scipy.stats.multivariate_normal(m.numpy(), c.numpy()).logpdf(v.numpy())
        for m, c, v in zip(prediction.mean, covariance, y, strict=True)
    ]
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-8)


def test_outcomes_are_drawn_with_that_correlation(shared, generator):
    # the covariance of S draws: each entry's standard error is sqrt((c_ij² + c_ii c_jj) / S)
    posterior, x = shared
    draws = 20_000
    found = posterior.predict(x).draw(draws, generator=generator)  # (S, rows, 2)
    covariance = row_covariances(posterior, x)
    for row in range(4):
        estimate, c = found[:, row].T.cov(), covariance[row]
        error = ((c**2 + c.diag().outer(c.diag())) / draws).sqrt()
        assert ((estimate - c).abs() < 4.5 * error).all()


def test_correlated_normal_marginals_are_plain_normals(generator):
    factor = torch.tensor([[[1.0, 0.0], [0.5, 2.0]]], dtype=torch.float64)
    std = (factor @ factor.mT).diagonal(dim1=1, dim2=2).sqrt().unsqueeze(0)
    components = CorrelatedNormal(torch.zeros(1, 1, 2, dtype=torch.float64), std, factor)
    y = torch.tensor([[0.3, -0.7]], dtype=torch.float64)
    expected = scipy.stats.norm(0, std[0, 0].numpy()).cdf(y[0].numpy())
    np.testing.assert_allclose(components.cdf(y)[0, 0], expected, rtol=1e-10)
    torch.testing.assert_close(components.variance, std**2)
