from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn

FLAT = {"likelihood.*": kn.Flat(), "*": kn.Flat()}


def normal_pair(correlation: float, n: int = 200) -> tuple[Tensor, Tensor]:
    """Inputs and targets whose sample moments are exactly those of standard normals with that correlation."""
    x, e = torch.randn(2, n, dtype=torch.float64)
    x = (x - x.mean()) / x.std(correction=0)
    e = e - e.mean() - (e @ x) / n * x
    y = correlation * x + math.sqrt(1 - correlation**2) * e / e.std(correction=0)
    return x.unsqueeze(1), y.unsqueeze(1)


def linear_model(prior: object = FLAT) -> kn.Model:
    """A linear encoder to one number, a linear decoder, noise to be learned: the whole family of the optimum."""
    return kn.Model(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double(), kn.Gaussian(), prior)  # type: ignore[arg-type]


def gaussian_optimum(correlation: float, beta: float) -> tuple[float, float]:
    """Rate and distortion of the best normal code of normal variables (Chechik et al., 2005), in nats.

    D(R) = h(y) + log(1 - rho^2 (1 - exp(-2 R))) / 2, whose slope is -beta at the optimum.
    """
    squared = correlation**2
    if beta >= squared:
        return 0.0, 0.5 * math.log(2 * math.pi * math.e)
    left = beta * (1 - squared) / (squared * (1 - beta))  # exp(-2 R)
    distortion = 0.5 * math.log(2 * math.pi * math.e) + 0.5 * math.log(1 - squared * (1 - left))
    return -0.5 * math.log(left), distortion


@pytest.mark.parametrize("beta", [0.05, 0.3])
def test_normal_variables_reach_the_known_optimum(seed, beta):
    # all terms depend on second moments alone, which the data has exactly. The learned marginal becomes the code's own,
    # so that the rate is the information. Near the optimum D + beta R is flat: it is close before R and D are
    x, y = normal_pair(0.9)
    rate, distortion = gaussian_optimum(0.9, beta)
    method = kn.InformationBottleneck(
        layer="0", beta=beta, marginal="learned", epochs=600, learning_rate=0.03, draws=8, initial_scale=0.5
    )
    posterior = method.fit(linear_model(), (x, y), seed=seed)
    found = posterior.diagnostics
    error = 4 * found["distortion_standard_error"]
    assert found["distortion"] + beta * found["rate"] == pytest.approx(distortion + beta * rate, abs=0.01 + error)
    assert found["rate"] == pytest.approx(rate, rel=0.1)


def test_rate_that_is_not_worth_its_price_is_not_paid(seed):
    x, y = normal_pair(0.6)  # information costs more than it brings beyond beta = 0.36
    method = kn.InformationBottleneck(layer="0", beta=0.7, epochs=400, learning_rate=0.03, draws=4, initial_scale=0.5)
    found = method.fit(linear_model(), (x, y), seed=seed).diagnostics
    assert found["rate"] < 0.01
    assert found["distortion"] == pytest.approx(gaussian_optimum(0.6, 0.7)[1], abs=0.02)


def test_rate_falls_and_distortion_rises_with_beta(seed):
    x, y = normal_pair(0.9)
    found = []
    for beta in (0.01, 0.1, 0.5):
        method = kn.InformationBottleneck(layer="0", beta=beta, epochs=300, learning_rate=0.03, draws=4)
        found.append(method.fit(linear_model(), (x, y), seed=seed).diagnostics)
    rates, distortions = ([each[name] for each in found] for name in ("rate", "distortion"))
    assert rates[0] > rates[1] > rates[2]
    assert distortions[0] < distortions[1] < distortions[2]


def test_without_a_price_it_is_ordinary_training(seed):
    # at beta = 0 noise in the code only hurts: what is left of it costs less than 0.02 nats per example
    x, y = normal_pair(0.9)
    method = kn.InformationBottleneck(layer="0", beta=0.0, epochs=600, learning_rate=0.03)
    found = method.fit(linear_model(), (x, y), seed=seed).diagnostics
    least = 0.5 * math.log(2 * math.pi * math.e * (1 - 0.9**2))  # that of maximum likelihood
    assert found["distortion"] - least > -4 * found["distortion_standard_error"]
    assert found["distortion"] - least < 0.02


def test_prior_of_the_weights_counts_as_in_map(seed):
    x, y = normal_pair(0.9)
    tight = {"likelihood.*": kn.Flat(), "*": kn.Normal(0.05)}
    method = kn.InformationBottleneck(layer="0", beta=0.0, epochs=200, learning_rate=0.03)
    loose, held = (method.fit(linear_model(prior), (x, y), seed=seed) for prior in (FLAT, tight))
    assert held.mean()["1.weight"].abs() < 0.5 * loose.mean()["1.weight"].abs()


def test_network_written_for_split_features_is_fitted(seed):
    # the network does not run without its bottleneck: the decoder takes half of what the encoder gives
    x, y = normal_pair(0.9)
    net = nn.Sequential(nn.Linear(1, 2), nn.Linear(1, 1)).double()
    method = kn.InformationBottleneck(
        layer="0", scale="split", beta=0.05, marginal="learned", epochs=600, learning_rate=0.03, draws=8
    )
    found = method.fit(kn.Model(net, kn.Gaussian(), FLAT), (x, y), seed=seed).diagnostics
    rate, distortion = gaussian_optimum(0.9, 0.05)
    error = 4 * found["distortion_standard_error"]
    assert found["distortion"] + 0.05 * found["rate"] == pytest.approx(distortion + 0.05 * rate, abs=0.01 + error)


def test_classification_and_images_work_and_say_what_they_are(seed):
    x = torch.randn(40, 1, 6, 6)
    y = (x.mean((1, 2, 3)) > 0).long()
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    posterior = kn.InformationBottleneck(layer="0", beta=0.001, epochs=60).fit(
        kn.Model(net, kn.Categorical()), (x, y), seed=seed
    )
    mean, std = posterior.encode(x)
    assert mean.shape == std.shape == (40, 3, 4, 4)
    assert torch.allclose(posterior.rate(x).mean(), torch.tensor(posterior.diagnostics["rate"]), rtol=1e-3)
    assert posterior.log_evidence is None
    assert "point estimates" in posterior.diagnostics.notes[0]
    assert (posterior.predict(x).epistemic >= 0).all()


@pytest.mark.parametrize(
    "changes",
    [{"layer": 3}, {"beta": -0.1}, {"scale": "both"}, {"marginal": "mixture"}, {"draws": 0}, {"initial_scale": 0.0}],
    ids=repr,
)
def test_settings_that_make_no_sense_are_refused_by_name(changes):
    with pytest.raises(kn.KnowableError, match=next(iter(changes))):
        kn.InformationBottleneck(**changes)


def test_layer_that_gives_no_code_is_refused_in_words():
    net = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).double()
    with pytest.raises(kn.Unsupported, match="even number of features"):
        kn.InformationBottleneck(layer="0", scale="split", epochs=1).fit(
            kn.Model(net, kn.Gaussian(0.1)), normal_pair(0.5)
        )


def test_prior_whose_scale_is_learned_is_refused():
    model = linear_model(kn.EmpiricalBayes(kn.Normal(1.0)))
    with pytest.raises(kn.Unsupported, match="InformationBottleneck cannot learn the prior's own scale"):
        kn.InformationBottleneck(epochs=1).fit(model, normal_pair(0.5))
