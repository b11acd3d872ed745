from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn

PROBABILITIES = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)


def model_of() -> kn.Model:
    net = kn.gated(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), "0").double()
    return kn.Model(net, kn.Gaussian(0.1), {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)})


def posterior_of(model: kn.Model) -> kn.BernoulliNormal:
    start = model.params()
    names = [name for name in model.random_names if not name.endswith("gate")]
    loc = {name: start[name] for name in names}
    scale = {name: 0.1 + start[name].abs() for name in names}
    return kn.BernoulliNormal(model, {"0.1.gate": PROBABILITIES}, loc, scale)


def test_draws_have_the_probabilities_and_moments(generator):
    # 4,000 draws: frequencies and means within 4.5 standard errors
    posterior = posterior_of(model_of())
    drawn, mean, std = posterior.sample(4000, generator), posterior.mean(), posterior.std()
    assert set(drawn["0.1.gate"].unique().tolist()) == {0.0, 1.0}
    for name, value in drawn.items():
        assert ((value.mean(0) - mean[name]).abs() < 4.5 * std[name] / math.sqrt(4000)).all(), name
    torch.testing.assert_close(mean["0.1.gate"], PROBABILITIES)
    torch.testing.assert_close(std["0.1.gate"], (PROBABILITIES * (1 - PROBABILITIES)).sqrt())


def test_log_prob_is_that_of_bernoullis_and_normals(generator):
    posterior = posterior_of(model_of())
    drawn = posterior.sample(5, generator)
    expected = torch.distributions.Bernoulli(PROBABILITIES).log_prob(drawn["0.1.gate"]).sum(1)
    for name, loc in posterior.loc.items():
        each = torch.distributions.Normal(loc, posterior.scale[name]).log_prob(drawn[name])
        expected = expected + each.flatten(1).sum(1)
    torch.testing.assert_close(posterior.log_prob(drawn), expected)
    between = {**drawn, "0.1.gate": drawn["0.1.gate"] + 0.5}
    assert (posterior.log_prob(between) == -math.inf).all()
    with pytest.raises(kn.InvalidArgument, match="params lacks"):
        posterior.log_prob({"0.1.gate": drawn["0.1.gate"]})


def test_posterior_of_gates_alone_has_a_density_too(generator):
    net = nn.Sequential(kn.Gates(3), nn.Linear(3, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.1), {"0.gate": kn.BernoulliPrior(0.5)}, frozen="1.*")
    posterior = kn.BernoulliNormal(model, {"0.gate": PROBABILITIES}, {}, {})
    drawn = posterior.sample(6, generator)
    expected = torch.distributions.Bernoulli(PROBABILITIES).log_prob(drawn["0.gate"]).sum(1)
    torch.testing.assert_close(posterior.log_prob(drawn), expected)


def test_saving_and_loading_changes_nothing(tmp_path, generator):
    model = model_of()
    posterior, x = posterior_of(model), torch.randn(4, 2, dtype=torch.float64)
    posterior.save(tmp_path / "gates")
    again = kn.load(tmp_path / "gates", net=model.net)
    assert isinstance(again, kn.BernoulliNormal)
    assert torch.equal(again.predict(x, samples=20).samples, posterior.predict(x, samples=20).samples)
    assert torch.equal(again.probabilities["0.1.gate"], PROBABILITIES)


def test_it_cannot_be_a_prior_and_says_what_can():
    with pytest.raises(kn.Unsupported, match="Freeze the gates"):
        kn.Model(model_of().net, kn.Gaussian(0.1), posterior_of(model_of()))
