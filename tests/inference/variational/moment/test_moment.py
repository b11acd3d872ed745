"""Tests of inference by moments: exact on linear models, near the truth of the network on others."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.likelihood import Likelihood
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.moment.algebra import Moments
from knowable.inference.variational.moment.moment import MomentObjective, likelihood_moments
from knowable.testing import LinearGaussian, network_case
from tests.inference.variational.logistic import Logistic
from tests.inference.variational.monte_carlo import output_moments
from tests.inference.variational.oracle import expected_log_likelihood, flat_moments, loss_gradient

QUICK = {"epochs": 800, "learning_rate": 0.03}


@functools.cache
def fitted(seed: int) -> tuple[LinearGaussian, kn.MomentNormal]:
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    return problem, kn.MomentVI(**QUICK).fit(problem.model(), problem.data, seed=seed)


def test_linear_model_has_the_closed_form_optimum(seed):
    # no noise in the gradient: what is left is what Adam leaves
    problem, posterior = fitted(seed)
    loc, std = flat_moments(problem, posterior)
    torch.testing.assert_close(loc, problem.mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(std, problem.mean_field_std, rtol=1e-3, atol=0)


def test_reported_bound_is_that_of_the_fitted_normals(seed):
    problem, posterior = fitted(seed)
    exact = problem.elbo(*flat_moments(problem, posterior))
    assert abs(posterior.log_evidence - exact) < 4 * posterior.log_evidence.standard_error
    assert posterior.log_evidence.kind == "bound"


def test_prediction_is_that_of_the_fitted_normals(seed):
    problem, posterior = fitted(seed)
    loc, std = flat_moments(problem, posterior)
    prediction = posterior.predict(problem.x)
    variance = problem.design.square() @ std.square() + problem.noise**2
    torch.testing.assert_close(prediction.mean[:, 0], problem.design @ loc)
    torch.testing.assert_close(prediction.variance[:, 0], variance)


def test_tempered_fit_reaches_the_tempered_optimum(seed):
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed)
    posterior = kn.MomentVI(**QUICK, beta=0.3).fit(problem.model(), problem.data, seed=seed)
    _, std = flat_moments(problem, posterior)
    torch.testing.assert_close(std, problem.tempered(0.3).mean_field_std, rtol=1e-3, atol=0)


def test_logistic_regression_has_the_optimum_that_quadrature_finds(seed):
    problem = Logistic.make(n=60, seed=seed)
    posterior = kn.MomentVI(**QUICK).fit(problem.model(), problem.data, seed=seed)
    best = problem.optimum()
    for found, expected in zip((posterior.loc, posterior.scale), best, strict=True):
        torch.testing.assert_close(torch.cat([found["weight"][0], found["bias"]]), expected, rtol=5e-3, atol=5e-3)


def test_fitted_network_of_three_layers_has_the_moments_of_its_draws_within_five_per_cent(seed, generator):
    torch.manual_seed(seed)
    x, y = kn.datasets.sine_with_gap(n=60, seed=seed)
    net = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 1))
    posterior = kn.MomentVI(epochs=400).fit(kn.Model(net, kn.Gaussian(0.2)), (x, y), seed=seed)
    where = torch.linspace(-2.5, 2.5, 6).unsqueeze(1)
    found = posterior.predict(where)
    mean, std = output_moments(posterior, where, generator)
    assert ((found.mean - mean.squeeze(1)).abs() < 0.1 * std.squeeze(1)).all()
    torch.testing.assert_close(found.epistemic.sqrt().double(), std.squeeze(1), rtol=0.05, atol=0)


def test_labels_are_learned(seed):
    torch.manual_seed(seed)
    x, y = kn.datasets.two_moons(n=100, seed=seed)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    posterior = kn.MomentVI(epochs=500, learning_rate=0.02).fit(kn.Model(net, kn.Categorical()), (x, y), seed=seed)
    assert (posterior.predict(x).labels == y).float().mean() > 0.85


def test_prediction_may_sample(seed):
    problem = LinearGaussian.make(n=30, seed=seed)
    posterior = kn.MomentVI(epochs=5, prediction="sampling").fit(problem.model(), problem.data)
    assert posterior.prediction == "sampling"
    samples = posterior.predict(problem.x[:1].repeat(2, 1), samples=10).samples
    assert torch.equal(samples[:, 0], samples[:, 1])


def test_full_batches_do_not_depend_on_the_seed():
    problem = LinearGaussian.make(n=30)
    one, two = (kn.MomentVI(epochs=20).fit(problem.model(), problem.data, seed=seed) for seed in (1, 2))
    assert all(torch.equal(one.loc[name], two.loc[name]) for name in one.loc)


def test_layers_and_likelihoods_without_a_rule_are_refused_by_name():
    data = torch.randn(8, 3), torch.randn(8, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    with pytest.raises(kn.Unsupported, match="LayerNorm '1'"):
        kn.MomentVI(epochs=1).fit(kn.Model(net, kn.Gaussian()), data)

    @dataclass(frozen=True)
    class Absolute(Likelihood):
        def check_target(self, y, output, *, name="y"):
            return y

        def log_prob(self, output, y, params):
            return -(output - y).abs().sum(1)

        def predict(self, outputs, params, log_weights):
            raise NotImplementedError

    with pytest.raises(kn.Unsupported, match="Absolute"):
        kn.MomentVI(epochs=1).fit(kn.Model(nn.Linear(3, 1), Absolute()), data)


# --- moment objective ------------------------------------------------------------------------------------------------


def test_loss_is_the_closed_form_bound_of_a_linear_model(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = MomentObjective(problem.model(), problem.x, 20, initial_scale=0.2)
    loc, scale = objective.normals.loc_and_scale(objective.q)
    flat = problem.as_flat(loc), problem.as_flat(scale)
    loss, terms = objective(*problem.data)
    assert loss.item() == pytest.approx(-problem.elbo(*flat) / 20, rel=1e-10)
    assert terms["expected_log_likelihood"].item() == pytest.approx(expected_log_likelihood(problem, *flat), rel=1e-10)
    assert terms["kl"].item() == pytest.approx(kn.Normal(1.0).kl_from_normal(*flat).item(), rel=1e-10)


def test_gradient_is_the_closed_form_gradient(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = MomentObjective(problem.model(), problem.x, 20, initial_scale=0.2)
    loc, scale = (problem.as_flat(each) for each in objective.normals.loc_and_scale(objective.q))
    objective(*problem.data)[0].backward()
    parts = [problem.as_flat(objective.layout.views(each)) for each in objective.q.grad]
    torch.testing.assert_close(torch.cat(parts), loss_gradient(problem, loc, scale))


def test_loss_has_no_noise_and_draws_nothing(seed):
    case = network_case("mlp")
    objective = MomentObjective(case.model(), case.x, 16)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    losses = {objective(*case.data)[0].item() for _ in range(3)}
    assert len(losses) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("limit", [64, 0], ids=["covariances", "variances"])
def test_loss_of_a_network_is_near_the_mean_over_draws(seed, limit):
    # one hidden layer: moments of the output are exact, so what is left is the error of 500 draws
    case = network_case("mlp", dtype=torch.float64)
    moment = MomentObjective(case.model(), case.x, 16, initial_scale=0.1, limit=limit)
    usual = MeanFieldObjective(case.model(), case.x, 16, estimator="weight", initial_scale=0.1)
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = torch.stack([usual(*case.data)[0] for _ in range(500)])
    error = losses.std().item() / math.sqrt(500)
    assert abs(moment(*case.data)[0].item() - losses.mean().item()) < 4.5 * error + 1e-4


def test_batches_are_unbiased_for_the_whole(seed):
    problem = LinearGaussian.make(n=24, seed=seed)
    objective = MomentObjective(problem.model(), problem.x, 24)
    whole = objective(*problem.data)[0].item()
    parts = [objective(x, y)[0].item() for x, y in zip(*(v.split(6) for v in problem.data), strict=True)]
    assert sum(parts) / len(parts) == pytest.approx(whole, rel=1e-12)


def test_own_parameters_of_the_likelihood_come_with_their_spread():
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian())
    spread = Moments(torch.tensor(-1.0), torch.tensor(0.04))
    assert likelihood_moments(model, {"likelihood.log_noise": spread}) == {"log_noise": spread}
    point = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(), random=["weight", "bias"])
    found = likelihood_moments(point, {"likelihood.log_noise": Moments(torch.tensor(-1.0))})
    assert found["log_noise"].variance is None
    frozen = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(), frozen="likelihood.*")
    assert likelihood_moments(frozen, {})["log_noise"].mean == 0.0


def test_what_has_no_rule_is_refused_before_training():
    case = network_case("batchnorm_mlp")
    with pytest.raises(kn.Unsupported, match="BatchNorm1d"):
        MomentObjective(case.model(), case.x, 16)


# --- moment posterior ------------------------------------------------------------------------------------------------


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
    expected = torch.full((20, 1), 2 * 0.09).exp()  # l = 0
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
