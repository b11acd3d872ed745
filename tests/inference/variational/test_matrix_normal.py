from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.kronecker import KroneckerBlock
from knowable.core.network.params import Layout
from tests.inference.variational.family_oracle import dense_moments, normal_divergence

QUICK = {"epochs": 1000, "learning_rate": 0.03}


def several_outputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    x = x + torch.randn(40, 1, generator=generator, dtype=torch.float64)  # correlated inputs
    weight = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    return x, x @ weight.T + 0.5 * torch.randn(40, 2, generator=generator, dtype=torch.float64)


def exact(x: torch.Tensor, y: torch.Tensor, prior_mean: torch.Tensor, prior_precision: torch.Tensor):
    """Mean and precision of vec W, rows one after the other, for y = W x + 0.5 noise."""
    precision = prior_precision + torch.kron(torch.eye(2, dtype=torch.float64), x.T @ x) / 0.25
    right = prior_precision @ prior_mean + (y.T @ x).flatten() / 0.25
    return torch.linalg.solve(precision, right), precision


def test_linear_layer_with_several_outputs_has_a_posterior_that_factorises(seed):
    # W is (2, 3): U is the identity and V the covariance of one output's weights; 0.05 nats for what 1,000 steps leave
    x, y = several_outputs(seed)
    model = kn.Model(nn.Linear(3, 2, bias=False).double(), kn.Gaussian(0.5))
    posterior = kn.MatrixNormalVI(**QUICK, kl_gradient="path").fit(model, (x, y), seed=seed)
    mean, precision = exact(x, y, torch.zeros(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64))
    loc, covariance = dense_moments(posterior, Layout.of(model.params()))
    assert normal_divergence(loc, covariance, mean, precision) < 0.05
    evidence = torch.distributions.MultivariateNormal(
        torch.zeros(40, dtype=torch.float64), x @ x.T + 0.25 * torch.eye(40, dtype=torch.float64)
    )
    expected = sum(evidence.log_prob(y[:, k]).item() for k in range(2))
    assert abs(posterior.log_evidence - expected) < 4 * posterior.log_evidence.standard_error + 0.05


@pytest.mark.slow
def test_both_factors_are_found(seed):
    # prior precision A ⊗ B, and inputs whose Gram matrix over the noise is B: the posterior's is (A + I) ⊗ B
    generator = torch.Generator().manual_seed(seed)
    rows = torch.tensor([[2.0, 1.2], [1.2, 1.5]], dtype=torch.float64)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    columns = x.T @ x / 0.25
    y = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    model = kn.Model(nn.Linear(3, 2, bias=False).double(), kn.Gaussian(0.5))
    (row_values, row_basis), (column_values, column_basis) = torch.linalg.eigh(rows), torch.linalg.eigh(columns)
    block = KroneckerBlock(("weight",), (torch.Size([2, 3]),), row_values.outer(column_values), row_basis, column_basis)
    prior = kn.KroneckerNormal(model, {"weight": torch.zeros(2, 3, dtype=torch.float64)}, [block])
    informed = kn.Model(model.net, model.likelihood, prior)
    posterior = kn.MatrixNormalVI(**QUICK, kl_gradient="path").fit(informed, (x, y), seed=seed)
    mean, precision = exact(x, y, torch.zeros(6, dtype=torch.float64), torch.kron(rows, columns))
    torch.testing.assert_close(precision, torch.kron(rows + torch.eye(2, dtype=torch.float64), columns))
    loc, covariance = dense_moments(posterior, Layout.of(model.params()))
    assert normal_divergence(loc, covariance, mean, precision) < 0.05


def test_biases_are_independent_normals_and_layers_independent(seed):
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = kn.Model(net, kn.Gaussian())
    posterior = kn.MatrixNormalVI(epochs=100).fit(model, (x, x.sin()), seed=seed)
    blocks = {block.names: block for block in posterior.blocks}
    assert all(len(names) == 1 for names in blocks)
    for name in ("0.bias", "2.bias", "likelihood.log_noise"):
        assert blocks[(name,)].out_basis is None and blocks[(name,)].in_basis is None
    assert blocks[("0.weight",)].out_basis.shape == (4, 4) and blocks[("2.weight",)].in_basis.shape == (4, 4)


def test_step_is_finite_for_a_convolution():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    model = kn.Model(net, kn.Categorical())
    x, y = torch.randn(12, 1, 4, 4), torch.arange(12) % 3
    posterior = kn.MatrixNormalVI(epochs=5).fit(model, (x, y))
    assert math.isfinite(posterior.log_evidence)
    assert posterior.blocks[0].precision.shape == (2, 9)
