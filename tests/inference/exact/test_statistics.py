"""Sums over the data: heads and other networks, many outputs, loaders, rank-deficient features, many updates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

import knowable as kn
from tests.inference.exact.oracle import Conditioned, linear_layer_design

TIGHT = {"rtol": 1e-8, "atol": 1e-8}


class Spread(nn.Module):
    """The outputs of a linear layer in another shape: linear, but not its last operation."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.0


class Counted:
    """A loader that counts how often its rows are read."""

    def __init__(self, x: Tensor, y: Tensor, rows: int):
        self.x, self.y, self.rows, self.read = x, y, rows, 0

    def __iter__(self):
        for pair in zip(self.x.split(self.rows), self.y.split(self.rows), strict=True):
            self.read += len(pair[0])
            yield pair


@pytest.mark.parametrize("noise", [0.4, None, (0.2, 0.5, 1.0)])
@pytest.mark.parametrize("bias", [True, False])
def test_last_layer_and_column_by_column_give_the_same(seed, noise, bias):
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randn(40, 3, dtype=torch.float64)
    weights = torch.rand(40, dtype=torch.float64)
    net = nn.Sequential(kn.features.Polynomial(2, inputs=3), nn.Linear(9, 3, bias=bias)).double()
    quick, slow = (
        kn.ExactLinear().fit(kn.Model(each, kn.Gaussian(noise)), kn.Data((x, y), weights=weights))
        for each in (net, Spread(net))
    )
    torch.testing.assert_close(quick.loc, slow.loc, **TIGHT)
    torch.testing.assert_close(quick.covariance, slow.covariance, **TIGHT)
    assert quick.log_evidence == pytest.approx(slow.log_evidence, abs=1e-8)
    new = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(quick.predict(new).log_prob(y[:5]), slow.predict(new).log_prob(y[:5]), **TIGHT)


def test_layer_at_several_positions_of_a_row_is_counted_at_each(seed):
    # (rows, 4 steps, 2 inputs) through one layer: 4 outputs a row of each kind
    x, y = torch.randn(12, 4, 2, dtype=torch.float64), torch.randn(12, 4, 1, dtype=torch.float64)
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.5)), (x, y))
    flat = kn.ExactLinear().fit(
        kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.5)), (x.flatten(0, 1), y.flatten(0, 1))
    )
    torch.testing.assert_close(posterior.loc, flat.loc, **TIGHT)
    assert posterior.log_evidence == pytest.approx(flat.log_evidence, abs=1e-8)


def test_frozen_bias_is_part_of_what_is_explained_already(seed):
    x, y = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 1, dtype=torch.float64)
    net = nn.Linear(2, 1).double()
    posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(0.5), frozen="bias"), (x, y))
    zero, one = torch.zeros(2).double(), torch.ones(2).double()
    oracle = Conditioned(x, y[:, 0] - net.bias.item(), torch.full((20,), 0.5).double(), zero, one)
    torch.testing.assert_close(posterior.loc, oracle.mean, **TIGHT)
    assert posterior.log_evidence == pytest.approx(oracle.log_evidence, abs=1e-8)


def test_outputs_of_a_layer_are_regressions_of_their_own(seed):
    x, y = torch.randn(50, 4, dtype=torch.float64), torch.randn(50, 30, dtype=torch.float64)
    together = kn.ExactLinear().fit(kn.Model(nn.Linear(4, 30).double(), kn.Gaussian(0.5)), (x, y))
    apart = [
        kn.ExactLinear().fit(kn.Model(nn.Linear(4, 1).double(), kn.Gaussian(0.5)), (x, y[:, k])) for k in range(30)
    ]
    torch.testing.assert_close(together.mean()["weight"], torch.cat([each.mean()["weight"] for each in apart]), **TIGHT)
    assert together.log_evidence == pytest.approx(sum(each.log_evidence for each in apart), abs=1e-7)
    design = linear_layer_design(x, 30)
    precision = design.T @ design / 0.25 + torch.eye(150).double()
    torch.testing.assert_close(together.covariance, torch.linalg.inv(precision), **TIGHT)


def test_loader_is_read_once_and_gives_what_memory_gives(seed):
    x, y = torch.randn(10_000, 5, dtype=torch.float64), torch.randn(10_000, 1, dtype=torch.float64)
    model = kn.Model(nn.Linear(5, 1).double(), kn.Gaussian(), kn.NormalInverseGamma())
    loader = Counted(x, y, rows=999)
    streamed = kn.ExactLinear().fit(model, kn.Data(loader, size=10_000))
    whole = kn.ExactLinear().fit(model, (x, y))
    torch.testing.assert_close(streamed.loc, whole.loc, **TIGHT)
    assert streamed.log_evidence == pytest.approx(whole.log_evidence, abs=1e-6)  # of -14,000: the sums' own rounding
    assert loader.read <= 10_000 + 999  # the first batch may be looked at before
    assert streamed.training_rows is not None


@pytest.mark.parametrize("kind", ["twice", "zero", "more than rows"])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_rank_deficient_features_are_settled_by_the_prior(seed, kind, scale):
    x = torch.randn(12, 3, dtype=torch.float64)
    x = {
        "twice": torch.cat([x, x, -x], 1),
        "zero": torch.cat([x, torch.zeros(12, 2).double()], 1),
        "more than rows": torch.randn(12, 40, dtype=torch.float64),
    }[kind]
    y = x[:, :1] + 0.3 * torch.randn(12, 1, dtype=torch.float64)
    net = nn.Linear(x.shape[1], 1, bias=False).double()
    posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(0.3), kn.Normal(scale)), (x, y))
    size = x.shape[1]
    zero, std = torch.zeros(size).double(), torch.full((size,), scale).double()
    oracle = Conditioned(x, y[:, 0], torch.full((12,), 0.3).double(), zero, std)
    spread = {"rtol": 1e-6, "atol": 1e-8 * scale**2}  # the oracle inverts a matrix whose condition is (scale / 0.3)²
    torch.testing.assert_close(posterior.loc, oracle.mean, **spread)
    torch.testing.assert_close(posterior.covariance, oracle.covariance, **spread)
    assert posterior.log_evidence == pytest.approx(oracle.log_evidence, abs=1e-6)


def test_prior_too_wide_for_double_precision_is_refused():
    x = torch.randn(12, 1, dtype=torch.float64)
    net = nn.Linear(2, 1, bias=False).double()
    with pytest.raises(kn.InvalidArgument, match="narrower prior"):
        kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(1e-6), kn.Normal(1e6)), (torch.cat([x, -x], 1), x))


def test_bayesian_ridge_of_scikit_learn_at_its_own_scales(seed):
    x = torch.randn(80, 6, dtype=torch.float64)
    y = x @ torch.randn(6, 1, dtype=torch.float64) + 0.4 * torch.randn(80, 1, dtype=torch.float64)
    ridge = BayesianRidge(fit_intercept=False, tol=1e-10, max_iter=1000).fit(x.numpy(), y[:, 0].numpy())
    likelihood, prior = kn.Gaussian(ridge.alpha_**-0.5), kn.Normal(ridge.lambda_**-0.5)
    posterior = kn.ExactLinear().fit(kn.Model(nn.Linear(6, 1, bias=False).double(), likelihood, prior), (x, y))
    np.testing.assert_allclose(posterior.loc, ridge.coef_, rtol=0, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, ridge.sigma_, rtol=0, atol=1e-6)
    mean, std = ridge.predict(x.numpy(), return_std=True)
    prediction = posterior.predict(x)
    np.testing.assert_allclose(prediction.mean[:, 0], mean, rtol=0, atol=1e-6)
    np.testing.assert_allclose(prediction.std[:, 0], std, rtol=0, atol=1e-6)


def test_evidence_learns_the_scales_that_bayesian_ridge_learns(seed):
    # flat hyperpriors there and here but for the noise's own prior, which 400 rows outweigh
    x = torch.randn(400, 6, dtype=torch.float64)
    y = x @ torch.randn(6, 1, dtype=torch.float64) + 0.4 * torch.randn(400, 1, dtype=torch.float64)
    tiny = {"alpha_1": 1e-12, "alpha_2": 1e-12, "lambda_1": 1e-12, "lambda_2": 1e-12}
    ridge = BayesianRidge(fit_intercept=False, tol=1e-12, max_iter=5000, **tiny).fit(x.numpy(), y[:, 0].numpy())
    net = nn.Linear(6, 1, bias=False).double()
    points = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(), kn.EmpiricalBayes(kn.Normal(1.0))), (x, y)).points
    assert points["likelihood.log_noise"].exp().item() == pytest.approx(ridge.alpha_**-0.5, rel=2e-3)
    assert points["prior.*.log_scale"].exp().item() == pytest.approx(ridge.lambda_**-0.5, rel=2e-3)


def evidence_of_degree(degree: int, x: Tensor, y: Tensor) -> float:
    net = kn.features.Polynomial(degree).linear().double()
    return kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(0.3)), (x, y)).log_evidence


def best_degree(number: int) -> int:
    generator = torch.Generator().manual_seed(number)
    x = 4 * torch.rand((40, 1), generator=generator, dtype=torch.float64) - 2
    y = 0.5 - x + 0.8 * x**2 + 0.3 * torch.randn((40, 1), generator=generator, dtype=torch.float64)
    values = {degree: evidence_of_degree(degree, x, y) for degree in range(1, 8)}
    return max(values, key=values.__getitem__)


def test_evidence_chooses_the_degree_of_a_quadratic(seed):
    # right in more than 90 of 100 data sets (below): 5 of 8 or fewer have a probability of 0.004
    found = [best_degree(100 * seed + number) for number in range(8)]
    assert found.count(2) > 5


@pytest.mark.slow
def test_evidence_chooses_the_degree_of_a_quadratic_in_ninety_of_a_hundred():
    assert [best_degree(number) for number in range(100)].count(2) >= 90


def test_hundred_updates_are_one_fit(seed):
    x = torch.randn(100, 3, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(100, 1, dtype=torch.float64)
    model = kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(0.3))
    whole, posterior = kn.ExactLinear().fit(model, (x, y)), kn.ExactLinear().fit(model, (x[:1], y[:1]))
    total = float(posterior.log_evidence)
    for row in range(1, 100):
        posterior = posterior.update((x[row : row + 1], y[row : row + 1]))
        total += posterior.log_evidence
    torch.testing.assert_close(posterior.loc, whole.loc, **TIGHT)
    torch.testing.assert_close(posterior.covariance, whole.covariance, **TIGHT)
    assert math.isclose(total, whole.log_evidence, abs_tol=1e-8)
