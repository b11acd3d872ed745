"""Tests of predictions by moments: exact for a linear model, and those of very many draws for others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.testing import LinearGaussian, network_case
from tests.inference.variational.monte_carlo import output_moments


def spread_over(model: kn.Model, scale: float = 0.1, **settings) -> kn.MomentNormal:
    """A posterior around the network's own weights."""
    loc = {name: value for name, value in model.params().items() if name in model.random_names}
    points = {name: value for name, value in model.params().items() if name not in loc}
    return kn.MomentNormal(
        model, loc, {name: torch.full_like(value, scale) for name, value in loc.items()}, points=points, **settings
    )


def test_prediction_of_a_linear_model_is_one_normal_with_the_exact_moments(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    posterior = spread_over(problem.model(), 0.2)
    prediction = posterior.predict(problem.x)
    mean = problem.design @ problem.as_flat(posterior.loc)
    epistemic = 0.04 * problem.design.square().sum(1)
    torch.testing.assert_close(prediction.mean[:, 0], mean)
    torch.testing.assert_close(prediction.epistemic[:, 0], epistemic)
    torch.testing.assert_close(prediction.aleatoric[:, 0], torch.full_like(mean, problem.noise**2))
    expected = torch.distributions.Normal(mean, (epistemic + problem.noise**2).sqrt()).log_prob(problem.y[:, 0])
    torch.testing.assert_close(prediction.log_prob(problem.y), expected)


def test_prediction_of_three_layers_is_that_of_a_hundred_thousand_draws_within_five_per_cent(seed, generator):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
    posterior, x = spread_over(kn.Model(net, kn.Gaussian(0.1)), 0.12), torch.randn(5, 2)
    found = posterior.predict(x)
    mean, std = output_moments(posterior, x, generator)
    assert ((found.mean - mean).abs() < 0.05 * std).all()
    torch.testing.assert_close(found.epistemic.sqrt().double(), std, rtol=0.05, atol=0)


def test_learned_noise_has_its_expected_variance(seed):
    # E[σ²] = exp(2 l + 2 s²) of a log-normal σ; the mean over draws of the noise's variance says the same
    problem = LinearGaussian.make(n=20, seed=seed, dtype=torch.float32)
    posterior = spread_over(kn.Model(problem.model().net, kn.Gaussian()), 0.3)
    expected = torch.full((20, 1), -1.0).mul(2).add(2 * 0.09).exp()
    torch.testing.assert_close(posterior.predict(problem.x).aleatoric, expected)
    drawn = posterior.with_prediction("sampling").predict(problem.x, samples=2_000).aleatoric
    torch.testing.assert_close(drawn, expected, rtol=0.07, atol=0)  # 4.5 times 0.66 over √2,000


def test_outputs_that_are_correlated_are_drawn_so(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 3))
    posterior, x = spread_over(kn.Model(net, kn.Gaussian(0.1)), 0.2), torch.randn(2, 2)
    found = posterior.output_moments(x)
    samples = posterior.predict(x, samples=20_000).samples
    drawn = torch.stack([row.T.cov() for row in samples.unbind(1)])
    size = found.std.unsqueeze(1) * found.std.unsqueeze(2)
    assert ((drawn - found.covariance).abs() < 4.5 * size * (2 / 20_000) ** 0.5).all()


def test_class_probabilities_are_close_to_those_of_draws(seed):
    # the probit approximation is good to a few hundredths
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 10), nn.ReLU(), nn.Linear(10, 3))
    posterior, x = spread_over(kn.Model(net, kn.Categorical()), 0.3), torch.randn(6, 2)
    found = posterior.predict(x)
    drawn = posterior.with_prediction("sampling").predict(x, samples=5000)
    torch.testing.assert_close(found.probs, drawn.probs, rtol=0, atol=0.06)
    assert (found.epistemic >= 0).all() and found.epistemic.max() > 0


def test_images_of_labels_are_predicted_without_covariances(seed):
    torch.manual_seed(seed)
    model = kn.Model(nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1)), kn.Categorical())
    posterior = spread_over(model, 0.2)
    prediction = posterior.predict(torch.randn(2, 1, 8, 8), samples=8)
    assert prediction.probs.shape == (2, 3, 8, 8)
    assert posterior.output_moments(torch.randn(2, 1, 8, 8)).covariance is None
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(2, 8, 8))


def test_way_of_predicting_is_saved_with_it(tmp_path):
    case = network_case("mlp")
    for way in ("moments", "sampling"):
        posterior = spread_over(case.model(), prediction=way, limit=3)
        loaded = kn.load(posterior.save(tmp_path / way))
        assert type(loaded) is kn.MomentNormal
        assert (loaded.prediction, loaded.limit) == (way, 3)
        assert torch.equal(loaded.predict(case.x).samples, posterior.predict(case.x).samples)


def test_other_ways_of_predicting_are_refused():
    model = network_case("mlp").model()
    with pytest.raises(kn.InvalidArgument, match="prediction"):
        spread_over(model, prediction="guessing")
    with pytest.raises(kn.InvalidArgument, match="prediction"):
        spread_over(model).with_prediction("guessing")


def test_rows_in_blocks_are_the_rows_at_once(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    posterior, x = spread_over(kn.Model(net, kn.Gaussian(0.1))), torch.randn(50, 2)
    whole = posterior.output_moments(x)
    parts = posterior._output_moments(x, 3 * posterior._row_bytes(x))
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.covariance, whole.covariance)
