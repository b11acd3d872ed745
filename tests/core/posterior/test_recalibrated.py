"""Tests of posteriors that are recalibrated on held-out data."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import knowable as kn
from tests.core.cases import diagonal_posterior, linear_data, linear_model, mlp, same_params

DTYPE = torch.float64


def _labels(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn((rows, 2), generator=generator)
    logits = torch.cat([x, -x.sum(1, keepdim=True)], 1)
    return x, torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)


@pytest.fixture
def classifier(generator) -> kn.Posterior:
    return diagonal_posterior(kn.Model(mlp(2, 3), kn.Categorical()), generator)


@pytest.mark.parametrize("method", ["temperature", "vector", "isotonic"])
def test_a_recalibrated_classifier_is_a_posterior(method, classifier, generator, tmp_path):
    posterior = classifier.recalibrated(_labels(600, generator), method)
    x, y = _labels(300, generator)
    assert kn.metrics.nll(posterior.predict(x), y) < kn.metrics.nll(classifier.predict(x), y)
    assert same_params(posterior.mean(), classifier.mean()) and same_params(posterior.std(), classifier.std())
    draws = posterior.sample(3, generator=torch.Generator().manual_seed(1))
    assert same_params(draws, classifier.sample(3, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(posterior.log_prob(draws), classifier.log_prob(draws))
    assert posterior.as_prior().log_prob(posterior.mean()) == classifier.as_prior().log_prob(posterior.mean())
    loaded = kn.load(posterior.save(tmp_path / "posterior"))
    assert isinstance(loaded, kn.Recalibrated) and repr(loaded) == repr(posterior)
    assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)
    blocks = [each.probs for each in posterior.predict_stream(x, max_memory="200KB")]
    assert len(blocks) > 1
    torch.testing.assert_close(torch.cat(blocks), posterior.predict(x).probs, rtol=1e-4, atol=1e-5)
    assert method in repr(posterior) and "fitted to 600 rows, NLL" in repr(posterior)
    assert "DiagonalNormal" in repr(posterior)


def test_a_recalibrated_regression_covers(generator, tmp_path):
    x, y = linear_data(40, generator=generator)
    posterior = kn.ExactLinear().fit(linear_model(noise=0.5), (x, y.squeeze(1)))
    x, y = linear_data(400, generator=generator)
    recalibrated = posterior.recalibrated((x, y))
    x, y = linear_data(1000, generator=generator)
    before, after = kn.evaluate(posterior.predict(x), y), kn.evaluate(recalibrated.predict(x), y)
    assert before["coverage_90"] > 0.99
    assert abs(after["coverage_90"] - 0.9) < 4 * (0.09 / 400 + 0.09 / 1000) ** 0.5
    assert recalibrated.predict(x).mean.shape == (1000,)
    loaded = kn.load(recalibrated.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(x).mean, recalibrated.predict(x).mean)
    assert "scale=0." in repr(loaded)


def test_posteriors_of_several_members_and_recalibrated_ones_can_be_recalibrated(classifier, generator, tmp_path):
    held_out = _labels(300, generator)
    mixture = kn.Mixture(classifier.model, [classifier, diagonal_posterior(classifier.model, generator)])
    with warnings.catch_warnings():  # the second time there may be nothing to gain
        warnings.simplefilter("ignore", kn.CalibrationWarning)
        twice = mixture.recalibrated(held_out, "temperature").recalibrated(_labels(300, generator), "vector")
    loaded = kn.load(twice.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(held_out[0]).probs, twice.predict(held_out[0]).probs)
    both = kn.Mixture(classifier.model, [twice, classifier])
    expected = (twice.predict(held_out[0], 32).probs + classifier.predict(held_out[0], 32).probs) / 2
    assert (both.predict(held_out[0]).probs - expected).abs().mean() < 0.1


def test_batch_statistics_and_point_estimates_come_along(generator, tmp_path):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    data = _labels(100, generator)
    posterior = kn.MAP(epochs=3).fit(kn.Model(net, kn.Categorical(), random="last_layer"), data)
    held_out = _labels(100, generator)
    recalibrated = posterior.recalibrated(held_out, "temperature")
    loaded = kn.load(recalibrated.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(held_out[0]).probs, recalibrated.predict(held_out[0]).probs)


def test_where_no_map_is_clearly_better_predictions_stay(generator, tmp_path):
    x, y = linear_data(40, generator=generator)
    posterior = kn.ExactLinear().fit(linear_model(noise=0.1), (x, y.squeeze(1)))
    x = linear_data(200, generator=generator)[0]
    prediction = posterior.predict(x)
    levels = (torch.randperm(200, generator=generator) + 0.5) / 200
    y = prediction.mean + prediction.std * torch.special.ndtri(levels).to(prediction.mean)  # calibrated to the row
    recalibrated = posterior.recalibrated((x, y))
    assert "none: no map was clearly better on 200 rows" in repr(recalibrated)
    assert torch.equal(recalibrated.predict(x).mean, prediction.mean)
    loaded = kn.load(recalibrated.save(tmp_path / "posterior"))
    assert torch.equal(loaded.predict(x).std, prediction.std)
    with pytest.warns(kn.CalibrationWarning, match="takes 50 or more to say whether predictions should change"):
        posterior.recalibrated((x[:30], y[:30]))


def test_pixels_are_recalibrated(generator):
    net = nn.Conv2d(1, 2, 3, padding=1)
    posterior = diagonal_posterior(kn.Model(net, kn.Categorical()), generator)
    x = torch.randn((60, 1, 5, 5), generator=generator)
    y = (x[:, 0] > 0.5).long()
    recalibrated = posterior.recalibrated((x, y), "vector")
    assert (recalibrated.recalibration.rows, recalibrated.recalibration.outcomes) == (60, 1500)
    assert recalibrated.predict(x[:4]).probs.shape == (4, 2, 5, 5)


def test_training_rows_and_bad_data_are_refused(generator):
    data = _labels(80, generator)
    posterior = kn.MAP(epochs=2).fit(kn.Model(mlp(2, 3), kn.Categorical()), data)
    with pytest.raises(kn.InvalidData, match="80 of the 80 rows of held_out are rows that the posterior was fitted to"):
        posterior.recalibrated(data)
    with pytest.raises(kn.InvalidData, match="empty"):
        posterior.recalibrated((data[0][:0], data[1][:0]))
    with pytest.raises(kn.Unsupported, match="weights"):
        posterior.recalibrated(kn.Data(_labels(80, generator), weights=torch.ones(80)))
    with pytest.raises(kn.InvalidArgument, match="method must be one of"):
        posterior.recalibrated(_labels(80, generator), "platt")
    with pytest.raises(kn.Unsupported, match="outcomes of each draw before recalibration"):
        posterior.recalibrated(_labels(80, generator), "temperature").to_arviz(data[0])


def test_few_rows_and_harm_are_said(classifier, generator):
    with pytest.warns(kn.CalibrationWarning, match="held_out has 20 outcomes: it takes 50 or more"):
        classifier.recalibrated(_labels(20, generator), "temperature")
    good = linear_model(noise=0.1)
    posterior = kn.ExactLinear().fit(good, linear_data(50, generator=generator))
    with pytest.warns(kn.CalibrationWarning, match="held_out has 1 outcomes"):
        posterior.recalibrated(linear_data(1, generator=generator))


def test_several_outcomes_are_refused(generator):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(2, 2)

        def forward(self, x):
            out = self.body(x)
            return {"a": out[:, :1], "b": out[:, 1:]}

    model = kn.Model(Two(), kn.Joint({"a": kn.Gaussian(), "b": kn.Bernoulli()}))
    x = torch.randn((60, 2), generator=generator)
    data = (x, {"a": x[:, :1], "b": (x[:, 1:] > 0).float()})
    posterior = kn.MAP(epochs=2).fit(model, data)
    other = torch.randn((60, 2), generator=generator)
    with pytest.raises(kn.Unsupported, match="Fit models of single outcomes"):
        posterior.recalibrated((other, {"a": other[:, :1], "b": (other[:, 1:] > 0).float()}))
