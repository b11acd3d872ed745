"""Tests of the Bayesian bootstrap: against weighted least squares and Rubin's posterior of a mean."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.inference.ensembles.bayesian_bootstrap import dirichlet_weights
from tests.core.cases import DTYPE, batch_norm_net, linear_data, linear_model, mlp, same_params

LONG = {"epochs": 500, "learning_rate": 0.1}


class _Mean(nn.Module):
    """One number, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, dtype=DTYPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.expand(len(x), 1)


def _weights_of(seed: int, rows: int, members: int) -> torch.Tensor:
    with own_randomness(derive_seed(seed, "bootstrap")):
        return dirichlet_weights(torch.ones(rows, dtype=DTYPE), members)


def test_the_mean_has_rubins_posterior(seed):
    # with Dirichlet(1, ..., 1) weights: mean ȳ and variance Σ(y - ȳ)² / (n (n + 1)), over K members with the standard
    # errors of a mean and of a variance of (nearly) normal draws: 5 of those
    n, members = 15, 400
    y = torch.randn(n, 1, dtype=DTYPE) * 2 + 5
    model = kn.Model(_Mean(), kn.Gaussian(1.0), kn.Flat())
    posterior = kn.BayesianBootstrap(members, **LONG).fit(model, (torch.zeros(n, 1), y), seed=seed)
    draws = posterior.stack["value"].flatten()
    variance = ((y - y.mean()) ** 2).sum() / (n * (n + 1))
    assert abs(draws.mean() - y.mean()) < 5 * (variance / members).sqrt()
    assert abs(draws.var() / variance - 1) < 5 * (2 / members) ** 0.5
    expected = y.T @ _weights_of(seed, n, members) / n
    torch.testing.assert_close(draws, expected.flatten(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vectorise", [True, False])
def test_every_member_is_the_weighted_least_squares_fit_of_its_weights(vectorise, seed):
    x, y = linear_data()
    members = 3
    model = linear_model(noise=0.5, prior=kn.Normal(2.0))
    posterior = kn.BayesianBootstrap(members, vectorise=vectorise, epochs=600, learning_rate=0.1).fit(
        model, (x, y), seed=seed
    )
    design = torch.cat([x, torch.ones(20, 1, dtype=DTYPE)], 1)
    for k, weights in enumerate(_weights_of(seed, 20, members).T):
        precision = design.T @ (weights.unsqueeze(1) * design) / 0.25 + torch.eye(3, dtype=DTYPE) / 4
        expected = torch.linalg.solve(precision, design.T @ (weights.unsqueeze(1) * y) / 0.25).flatten()
        found = torch.cat([posterior.stack["weight"][k].flatten(), posterior.stack["bias"][k]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_weights_are_dirichlet_draws_times_the_number_of_rows(generator):
    # each share is Beta(1, n - 1): mean 1/n, variance (n - 1) / (n² (n + 1)); 5 standard errors
    n, members = 8, 20_000
    torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
    weights = dirichlet_weights(torch.ones(n), members)
    torch.testing.assert_close(weights.sum(0), torch.full((members,), float(n), dtype=torch.float64))
    variance = (n - 1) / (n + 1)
    assert ((weights.mean(1) - 1).abs() < 5 * (variance / members) ** 0.5).all()
    assert ((weights.var(1) / variance - 1).abs() < 5 * (8 / members) ** 0.5).all()  # kurtosis of an exponential: 9


def test_rows_that_count_more_have_larger_weights_and_rows_of_none_have_none(generator):
    counts = torch.tensor([0.0, 1.0, 4.0])
    torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
    weights = dirichlet_weights(counts, 20_000)
    assert (weights[0] == 0).all()
    torch.testing.assert_close(weights.sum(0), torch.full((20_000,), 5.0, dtype=torch.float64))
    # the second share is Beta(1, 4), of variance 4 / 150, times 5
    assert abs(weights[1].mean() - 1) < 5 * (25 * 4 / 150 / 20_000) ** 0.5
    posterior = kn.BayesianBootstrap(4, epochs=300, learning_rate=0.05).fit(
        kn.Model(_Mean(), kn.Gaussian(1.0), kn.Flat()),
        kn.Data((torch.zeros(3, 1), torch.tensor([100.0, 1.0, 1.0])), 3, counts),
    )
    torch.testing.assert_close(posterior.stack["value"], torch.ones(4, 1, dtype=DTYPE), rtol=1e-2, atol=1e-2)


def test_batch_norm_networks_are_trained_in_turn_with_statistics_of_their_own():
    model = kn.Model(batch_norm_net().to(DTYPE), kn.Gaussian())
    posterior = kn.BayesianBootstrap(2, epochs=10, batch_size=8).fit(model, linear_data())
    assert "in turn" in posterior.diagnostics.message
    assert (posterior.buffer_stack["1.running_mean"][0] != posterior.buffer_stack["1.running_mean"][1]).any()


def test_a_loader_is_read_into_memory_and_gives_what_its_rows_give():
    x, y = linear_data()
    model, method = linear_model(), kn.BayesianBootstrap(3, epochs=20)
    loader = DataLoader(TensorDataset(x, y), batch_size=6, shuffle=True)
    assert same_params(method.fit(model, loader).stack, method.fit(model, (x, y)).stack)


def test_point_estimates_are_trained_on_all_rows_alike():
    model, data = kn.Model(mlp().to(DTYPE), kn.Gaussian(0.1), random="last_layer"), linear_data()
    posterior = kn.BayesianBootstrap(3, epochs=40).fit(model, data, seed=4)
    assert same_params(posterior.points, kn.MAP(epochs=40).fit(model, data, seed=4).points)
    assert len(posterior.stack["2.bias"].unique()) == 3
