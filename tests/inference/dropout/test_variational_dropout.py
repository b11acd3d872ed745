from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from tests.inference.dropout.noise_oracle import NoiseRegression

SLACK = 0.2  # nats that Adam's last, small steps leave


def test_learned_strength_is_the_best_of_a_linear_model(seed):
    problem = NoiseRegression.make(seed)
    method = kn.VariationalDropout(epochs=600, learning_rate=0.05)
    posterior = method.fit(problem.model(), problem.data, seed=seed)
    best_alpha = problem.best_alpha(1.0)
    best = problem.bound(problem.best_weights(best_alpha), torch.full((3,), best_alpha, dtype=torch.float64).log())
    found = problem.bound(posterior.loc["weight"][0], posterior.log_alpha()["weight"][0])
    assert 0 <= best - found < SLACK
    start = problem.bound(problem.best_weights(0.25), torch.full((3,), 0.25, dtype=torch.float64).log())
    assert best - start > 2 * SLACK  # alpha has moved a long way to get there
    terms = posterior.diagnostics.terms
    assert terms["alpha.weight"] == pytest.approx(posterior.log_alpha()["weight"].exp().mean().item(), rel=1e-6)


@pytest.mark.parametrize(("share", "count"), [("layer", 1), ("neuron", 4), ("weight", 12)])
def test_strength_is_shared_by_layer_neuron_or_weight(seed, share, count):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(40, 3, dtype=torch.float64)
    method = kn.VariationalDropout(share, epochs=40, learning_rate=0.05, max_alpha=0.8)
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, x[:, :1]))
    alpha = posterior.log_alpha()["0.weight"].exp()
    assert (alpha < 0.8).all()
    assert len(alpha.flatten().log().mul(1e9).round().unique()) == count
    if share == "neuron":
        torch.testing.assert_close(alpha, alpha[:, :1].expand(4, 3))


def test_noise_that_data_does_not_mind_grows_to_its_bound_and_no_further(seed):
    x = torch.randn(50, 2, dtype=torch.float64)
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[2.0, 1e-3]]))
    method = kn.VariationalDropout("weight", epochs=500, learning_rate=0.05)
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.3)), (x, 2 * x[:, :1]), seed=seed)
    needed, idle = posterior.log_alpha()["weight"][0].exp()
    assert needed < 0.05 and 0.5 < idle < 1.0


def test_factor_on_the_divergence_is_noted_and_weakens_the_noise(seed):
    problem = NoiseRegression.make(seed)
    alphas = {}
    for beta in (0.1, 1.0):
        method = kn.VariationalDropout(epochs=300, learning_rate=0.05, beta=beta)
        posterior = method.fit(problem.model(), problem.data, seed=seed)
        alphas[beta] = posterior.diagnostics.terms["alpha.weight"]
        assert posterior.diagnostics.bayes is (beta == 1.0)
    assert alphas[0.1] < alphas[1.0]


@pytest.mark.parametrize(
    ("settings", "error", "wanted"),
    [
        ({"share": "network"}, kn.InvalidArgument, "share must be"),
        ({"max_alpha": 0.0}, kn.InvalidArgument, "max_alpha must be"),
        ({"beta": 0.0}, kn.InvalidArgument, "beta must be"),
        ({"start": "zero"}, kn.InvalidArgument, "start must be"),
    ],
)
def test_wrong_settings_are_refused(settings, error, wanted):
    with pytest.raises(error, match=wanted):
        kn.VariationalDropout(**settings)
