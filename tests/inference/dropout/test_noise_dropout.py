from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn

METHODS = pytest.mark.parametrize("method", [kn.GaussianDropout, kn.VariationalDropout])
QUICK = {"epochs": 2, "batch_size": 8}


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(24, 3)
    return x, x[:, :1]


@METHODS
def test_noise_is_on_weights_and_all_else_are_points(method, data):
    posterior = method(**QUICK).fit(kn.Model(perceptron(), kn.Gaussian()), data)
    assert set(posterior.loc) == {"0.weight", "2.weight"}
    assert set(posterior.points) == {"0.bias", "2.bias", "likelihood.log_noise"}
    assert posterior.model.prior.prior_of("0.weight") == kn.LogUniform()
    assert {"elbo", "kl"} <= posterior.diagnostics.terms.keys() and posterior.log_evidence is None
    assert any("is log-uniform here" in note for note in posterior.diagnostics.notes)


@METHODS
def test_weights_can_be_named(method, data):
    posterior = method(**QUICK, where=["2.weight"]).fit(kn.Model(perceptron(), kn.Gaussian(0.1)), data)
    assert set(posterior.loc) == {"2.weight"}


@METHODS
def test_a_posterior_is_where_it_begins(method, data):
    mode = kn.MAP(epochs=40).fit(kn.Model(perceptron(), kn.Gaussian(0.1)), data)
    model = kn.Model(perceptron(), kn.Gaussian(0.1))
    posterior = method(epochs=1, learning_rate=1e-7, start=mode).fit(model, data)
    for name, value in posterior.mean().items():
        torch.testing.assert_close(value, mode.mean()[name], rtol=0, atol=1e-5)
