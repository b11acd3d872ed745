"""A prediction in other units is the same distribution: densities, quantiles, moments and draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

import knowable as kn
from knowable.core.prediction.components import CorrelatedNormal, NormalComponents, restored, transformed
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.errors import Unsupported
from knowable.likelihoods.poisson import PoissonComponents

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


# --- transformed normals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["log", "logit"])
def test_a_transformed_normal_matches_numerical_integration(transform: str, generator: torch.Generator):
    """Density, moments, distribution function and draws of T⁻¹(shift + scale x) for a mixture of normals x."""
    loc = torch.tensor([[[0.2]], [[-0.5]]], dtype=torch.float64)
    scale = torch.tensor([[[0.3]], [[0.6]]], dtype=torch.float64)
    inner = RegressionPrediction(NormalComponents(loc, scale), torch.tensor([0.4, 0.6], dtype=torch.float64).log())
    shift, stretch = torch.tensor([0.3], dtype=torch.float64), torch.tensor([0.8], dtype=torch.float64)
    found = transformed(inner, transform, shift, stretch)
    forward = np.log if transform == "log" else special.logit
    slope = (lambda y: 1 / y) if transform == "log" else (lambda y: 1 / (y * (1 - y)))
    top = 60.0 if transform == "log" else 1.0

    def density(y: float) -> float:
        return sum(
            w * stats.norm.pdf(forward(y), 0.3 + 0.8 * m, 0.8 * s) * slope(y)
            for w, m, s in ((0.4, 0.2, 0.3), (0.6, -0.5, 0.6))
        )

    def moment(power: int, end: float = top) -> float:
        return integrate.quad(lambda y: y**power * density(y), 0, end, limit=400, epsabs=1e-12)[0]

    assert moment(0) == pytest.approx(1, abs=1e-8)
    assert found.mean.item() == pytest.approx(moment(1), rel=1e-7)
    assert found.variance.item() == pytest.approx(moment(2) - moment(1) ** 2, rel=1e-6)
    for y in (0.2, 0.7):
        at = torch.tensor([[y]], dtype=torch.float64)
        assert found.log_prob(at).item() == pytest.approx(np.log(density(y)), rel=1e-9)
        assert found.cdf(at).item() == pytest.approx(moment(0, y), rel=1e-7)
    assert found.cdf(torch.tensor([[-1.0]]).double()).item() == 0
    assert torch.isneginf(found.log_prob(torch.tensor([[-1.0]]).double())).all()
    assert moment(0, found.quantile(0.9).item()) == pytest.approx(0.9, abs=1e-6)
    drawn = found.draw(20_000, generator=generator)
    assert abs(drawn.mean() - found.mean).item() < 4.5 * found.std.item() / 20_000**0.5


def test_a_transform_needs_normal_noise():
    with pytest.raises(Unsupported, match="log transform of the targets needs normal noise"):
        transformed(
            RegressionPrediction(PoissonComponents(torch.zeros(1, 2, 1)), torch.zeros(1)), "log", torch.zeros(1),
            torch.ones(1),
        )  # fmt: skip
