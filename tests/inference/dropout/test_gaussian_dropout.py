from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from tests.inference.dropout.noise_oracle import NoiseRegression

ALPHA = 0.3
# how close a fit comes to the maximum of its bound, in nats: what Adam's last, small steps leave
SLACK = 0.2


@pytest.mark.parametrize("batch_size", [None, 20], ids=["all rows", "batches"])
def test_on_a_linear_model_it_is_ridge_regression_with_a_penalty_from_the_data(seed, batch_size):
    problem = NoiseRegression.make(seed)
    method = kn.GaussianDropout(ALPHA, epochs=400, learning_rate=0.05, batch_size=batch_size)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    log_alpha = torch.full((3,), ALPHA, dtype=torch.float64).log()
    best = problem.bound(problem.best_weights(ALPHA), log_alpha)
    assert 0 <= best - problem.bound(posterior.loc["weight"][0], log_alpha) < SLACK
    no_noise = problem.bound(problem.best_weights(0.0), log_alpha)
    assert best - no_noise > 2 * SLACK  # the slack would not hide that there is noise


def test_noise_is_alpha_times_the_squared_mean(seed):
    problem = NoiseRegression.make(seed)
    posterior = kn.GaussianDropout(ALPHA, epochs=3).fit(problem.model(), problem.data)
    torch.testing.assert_close(posterior.scale["weight"], ALPHA**0.5 * posterior.loc["weight"].abs())
    assert posterior.diagnostics.terms["kl"] == pytest.approx(
        kn.LogUniform().kl_from_normal(posterior.loc["weight"], posterior.scale["weight"]).item()
    )
    assert posterior.log_evidence is None  # the prior is improper
    assert any("prior of weight is log-uniform" in note for note in posterior.diagnostics.notes)


def test_model_that_is_log_uniform_already_needs_no_note(seed):
    problem = NoiseRegression.make(seed)
    posterior = kn.GaussianDropout(epochs=1).fit(problem.model(prior=kn.LogUniform()), problem.data)
    assert not any("log-uniform" in note for note in posterior.diagnostics.notes)


def digits_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 10))


@pytest.mark.slow
def test_variance_network_predicts_although_a_layer_has_no_mean(seed):
    # chance is 0.1, with a standard error of 0.016 on these rows; seed 0 gave 0.84
    train, test = kn.datasets.digits().split(seed)
    model = kn.Model(digits_network(), kn.Categorical())
    posterior = kn.GaussianDropout(epochs=80, zero_mean="2.weight").fit(model, (train.x, train.y), seed=seed)
    assert (posterior.mean()["2.weight"] == 0).all() and (posterior.std()["2.weight"] > 0).all()

    def accuracy(samples: int) -> float:
        return (posterior.predict(test.x, samples=samples).labels == test.y).float().mean().item()

    assert accuracy(64) > 0.6
    assert accuracy(64) > accuracy(1)
    means = posterior.model.forward(posterior.mean(), test.x, buffers=posterior.buffers)
    assert (means == means[:1]).all()  # the mean weights know nothing


def test_signal_in_the_variance_alone_is_found(seed):
    # y = 1 where |x| is large: what a weight of mean 0 does to x has that variance
    x = torch.linspace(-2, 2, 200).unsqueeze(1)
    y = (x.squeeze(1).abs() > 1).long()
    net = nn.Sequential(nn.Linear(1, 30, bias=False), nn.ReLU(), nn.Linear(30, 2))
    method = kn.GaussianDropout(epochs=200, zero_mean="0.weight", learning_rate=0.03)
    posterior = method.fit(kn.Model(net, kn.Categorical()), (x, y), seed=seed)
    assert (posterior.loc["0.weight"] == 0).all()
    found = posterior.predict(x, samples=64).labels
    assert (found == y).float().mean() > 0.85


def test_zero_mean_is_a_choice_among_the_noisy_weights():
    model = kn.Model(digits_network(), kn.Categorical())
    data = torch.zeros(4, 64), torch.zeros(4, dtype=torch.long)
    for method in (kn.GaussianDropout(zero_mean="2.bias"), kn.GaussianDropout(zero_mean="2.weight", where="0.weight")):
        with pytest.raises(kn.InvalidArgument, match=r"zero_mean='2.(bias|weight)' matches no parameter"):
            method.fit(model, data)


@pytest.mark.parametrize(
    ("settings", "error", "wanted"),
    [
        ({"alpha": 0.0}, kn.InvalidArgument, "alpha must be"),
        ({"alpha": "much"}, kn.InvalidType, "alpha must be"),
        ({"zero_mean": 3}, kn.InvalidType, "zero_mean must be None"),
        ({"where": []}, kn.InvalidType, "where must be None"),
        ({"draws": 0}, kn.InvalidArgument, "draws must be"),
    ],
)
def test_wrong_settings_are_refused(settings, error, wanted):
    with pytest.raises(error, match=wanted):
        kn.GaussianDropout(**settings)
