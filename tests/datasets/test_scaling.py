"""Standardised units lead back to the original ones, for numbers and for whole distributions."""

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from knowable.core.prediction.prediction import RegressionPrediction
from knowable.datasets import Dataset, Scaler, blobs, heteroscedastic_sine, motorcycle
from knowable.errors import InvalidData, Unsupported


class NormalComponents:
    """K normal distributions over ``(K, batch)`` outcomes, by torch.distributions."""

    discrete = False

    def __init__(self, mean, std):
        self.normal = Normal(mean, std)
        self.mean, self.variance = mean, std**2

    def log_prob(self, y):
        return self.normal.log_prob(y)

    def cdf(self, y):
        return self.normal.cdf(y)

    def sample(self, index, *, generator=None):
        mean, std = self.mean.gather(0, index), self.variance.sqrt().gather(0, index)
        return mean + std * torch.randn(index.shape, generator=generator, dtype=mean.dtype)


def mixture(k, batch, generator):
    mean = torch.randn(k, batch, generator=generator, dtype=torch.float64)
    std = 0.2 + torch.rand(k, batch, generator=generator, dtype=torch.float64)
    log_weights = torch.log_softmax(torch.randn(k, generator=generator, dtype=torch.float64), 0)
    return mean, std, log_weights


@pytest.mark.parametrize("make", [motorcycle, heteroscedastic_sine, blobs])
def test_standardising_and_restoring_gives_the_data_back(make):
    data = make()
    scaled, scaler = data.standardised()
    torch.testing.assert_close(scaler.restore_x(scaled.x), data.x, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(scaler.restore_y(scaled.y), data.y, rtol=1e-5, atol=1e-4)


def test_the_training_scaler_applies_to_other_rows():
    train, held = motorcycle().split(0)
    scaler = Scaler.of(train)
    expected = (held.y - train.y.mean()) / train.y.std(correction=0)
    torch.testing.assert_close(scaler.apply(held).y, expected)


def test_constant_columns_and_outcomes_are_centred_and_not_divided():
    data = Dataset(name="flat", x=torch.full((7, 2), 0.1), y=torch.full((7,), 3.3), x_names=("a", "b"), y_name="y")
    scaled, scaler = data.standardised()
    assert torch.equal(scaler.x_scale, torch.ones(2)) and scaler.y_scale == 1.0
    assert scaled.x.abs().max() < 1e-6 and scaled.y.abs().max() < 1e-5


def test_class_labels_are_left_as_they_are():
    data = blobs()
    scaled, _ = data.standardised()
    assert torch.equal(scaled.y, data.y)


def test_no_rows_cannot_be_standardised():
    with pytest.raises(InvalidData, match="without rows"):
        blobs().rows(torch.zeros(0, dtype=torch.long)).standardised()


def test_a_restored_prediction_is_the_mixture_in_original_units(generator):
    # Oracle: torch's own mixture of normals with the means and scales multiplied out.
    shift, scale = -25.0, 48.0
    mean, std, log_weights = mixture(5, 4, generator)
    scaler = Scaler(torch.zeros(1), torch.ones(1), shift, scale)
    restored = scaler.restore(RegressionPrediction(NormalComponents(mean, std), log_weights))
    oracle = MixtureSameFamily(
        Categorical(logits=log_weights.expand(4, 5)), Normal(mean.T * scale + shift, std.T * scale)
    )
    y = torch.linspace(-100, 100, 4, dtype=torch.float64)
    torch.testing.assert_close(restored.mean, oracle.mean)
    torch.testing.assert_close(restored.variance, oracle.variance)
    torch.testing.assert_close(restored.log_prob(y), oracle.log_prob(y))
    low, high = restored.interval(0.8)
    torch.testing.assert_close(oracle.cdf(low), torch.full_like(low, 0.1))
    torch.testing.assert_close(oracle.cdf(high), torch.full_like(high, 0.9))
    torch.testing.assert_close(restored.samples, mean * scale + shift)


def test_variance_integrated_within_components_is_restored_as_epistemic(generator):
    mean, std, log_weights = mixture(3, 6, generator)
    within = 0.25 * std**2
    scaled = RegressionPrediction(NormalComponents(mean, std), log_weights, within=within)
    restored = Scaler(torch.zeros(1), torch.ones(1), 1.0, 3.0).restore(scaled)
    torch.testing.assert_close(restored.epistemic, scaled.epistemic * 9)
    torch.testing.assert_close(restored.aleatoric, scaled.aleatoric * 9)


def test_restored_draws_have_the_restored_moments(generator):
    mean, std, log_weights = mixture(2, 1, generator)
    restored = Scaler(torch.zeros(1), torch.ones(1), 10.0, 4.0).restore(
        RegressionPrediction(NormalComponents(mean, std), log_weights)
    )
    draws = restored.draw(20_000, generator=generator)[:, 0]
    standard_error = restored.std.item() / 20_000**0.5
    assert abs(draws.mean().item() - restored.mean.item()) < 4.5 * standard_error


def test_a_prediction_of_counts_is_not_taken_to_other_units(generator):
    mean, std, log_weights = mixture(2, 3, generator)
    counts = NormalComponents(mean, std)
    counts.discrete = True
    with pytest.raises(Unsupported, match="counts"):
        Scaler(torch.zeros(1), torch.ones(1), 1.0, 2.0).restore(RegressionPrediction(counts, log_weights))
