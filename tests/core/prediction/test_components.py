"""A prediction in other units is the same distribution: densities, quantiles, moments and draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

import knowable as kn
from knowable.core.prediction.components import CorrelatedNormal, NormalComponents, restored
from knowable.core.prediction.prediction import RegressionPrediction

SHIFT = torch.tensor([10.0, -3.0], dtype=torch.float64)
SCALE = torch.tensor([2.0, 0.5], dtype=torch.float64)


def mixture(generator: torch.Generator, draws: int = 3, rows: int = 4) -> RegressionPrediction:
    loc = torch.randn((draws, rows, 2), generator=generator, dtype=torch.float64)
    scale = 0.3 + torch.rand((draws, rows, 2), generator=generator, dtype=torch.float64)
    log_weights = torch.randn(draws, generator=generator, dtype=torch.float64).log_softmax(0)
    return RegressionPrediction(NormalComponents(loc, scale), log_weights)


def test_the_density_of_a_mixture_is_that_of_scaled_normals(generator: torch.Generator):
    before = mixture(generator)
    after = restored(before, SHIFT, SCALE)
    y = SHIFT + torch.randn((4, 2), generator=generator, dtype=torch.float64)
    inner = before.components
    assert isinstance(inner, NormalComponents)
    each = stats.norm.logpdf(y, SHIFT + SCALE * inner.loc, SCALE * inner.scale).sum(-1)  # (K, rows)
    expected = np.log((before.log_weights.exp()[:, None].numpy() * np.exp(each)).sum(0))
    np.testing.assert_allclose(after.log_prob(y), expected, rtol=1e-12)


def test_quantiles_moments_and_the_split_move_with_the_map(generator: torch.Generator):
    before = mixture(generator)
    after = restored(before, SHIFT, SCALE)
    torch.testing.assert_close(after.mean, SHIFT + SCALE * before.mean)
    torch.testing.assert_close(after.std, SCALE * before.std)
    torch.testing.assert_close(after.aleatoric, SCALE**2 * before.aleatoric)
    torch.testing.assert_close(after.epistemic, SCALE**2 * before.epistemic)
    torch.testing.assert_close(after.quantile(0.1), SHIFT + SCALE * before.quantile(0.1), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(after.samples, SHIFT + SCALE * before.samples)


def test_variance_within_components_stays_epistemic(generator: torch.Generator):
    before = mixture(generator)
    before.within = 0.1 * before.components.variance
    after = restored(before, SHIFT, SCALE)
    torch.testing.assert_close(after.aleatoric, SCALE**2 * before.aleatoric)


def test_the_joint_density_of_correlated_outputs_is_right(generator: torch.Generator):
    loc = torch.randn((1, 3, 2), generator=generator, dtype=torch.float64)
    covariance = torch.tensor([[1.0, 0.6], [0.6, 2.0]], dtype=torch.float64)
    factor = torch.linalg.cholesky(covariance).expand(3, 2, 2)
    components = CorrelatedNormal(loc, covariance.diagonal().sqrt().expand(1, 3, 2), factor)
    after = restored(RegressionPrediction(components, torch.zeros(1, dtype=torch.float64)), SHIFT, SCALE)
    y = SHIFT + torch.randn((3, 2), generator=generator, dtype=torch.float64)
    scaled = SCALE.diag() @ covariance @ SCALE.diag()
    expected = [stats.multivariate_normal(SHIFT + SCALE * loc[0, row], scaled).logpdf(y[row]) for row in range(3)]
    np.testing.assert_allclose(after.log_prob(y), expected, rtol=1e-10)


def test_draws_have_the_moments_of_the_prediction(generator: torch.Generator):
    after = restored(mixture(generator), SHIFT, SCALE)
    n = 20_000
    drawn = after.draw(n, generator=generator)
    error = after.std / n**0.5
    assert ((drawn.mean(0) - after.mean).abs() < 5 * error).all()  # five standard errors, for eight numbers


def test_a_plain_number_serves_all_outputs(generator: torch.Generator):
    before = mixture(generator)
    torch.testing.assert_close(restored(before, 1.0, 3.0).mean, 1 + 3 * before.mean)


def test_counts_have_no_other_units():
    model = kn.Model(torch.nn.Linear(1, 1), kn.Poisson())
    prediction = model.prior_predict(torch.zeros(2, 1), samples=3)
    assert isinstance(prediction, RegressionPrediction)
    torch.testing.assert_close(restored(prediction, 0.0, 1.0).mean, prediction.mean)
    with pytest.raises(kn.Unsupported, match="counts"):
        restored(prediction, 1.0, 2.0)
