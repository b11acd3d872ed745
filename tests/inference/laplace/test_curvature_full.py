"""Tests of the whole curvature matrix: dense products of Jacobians by torch.func are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.laplace.curvature import FullCurvature, prior_precision
from knowable.testing import NETWORKS
from tests.inference.laplace.oracle import case_expansion, dense_ggn, expansion_of, gradients

ONE = torch.ones(1, dtype=torch.float64)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_matrix_is_the_slow_one(name):
    expansion = case_expansion(name)
    expected = dense_ggn(expansion)
    found = FullCurvature.of(expansion).matrices[0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9 * expected.abs().max().item())


def test_the_empirical_fisher_is_the_sum_of_outer_products_of_gradients():
    expansion = case_expansion("batchnorm_cnn", kind="empirical_fisher")
    each = gradients(expansion)
    torch.testing.assert_close(FullCurvature.of(expansion).matrices[0], each.T @ each)


def _logistic():
    x = torch.randn(12, 2, dtype=torch.float64)
    model = kn.Model(nn.Linear(2, 1).double(), kn.Bernoulli())
    return model, (x, (x.sum(1) > 0).double())


def test_hessian_and_gauss_newton_agree_where_the_network_is_linear():
    model, data = _logistic()
    found = [FullCurvature.of(expansion_of(model, data, kind=kind)).matrices[0] for kind in ("ggn", "hessian")]
    torch.testing.assert_close(found[0], found[1])


def test_a_hessian_that_curves_down_is_set_to_zero_there_and_says_so():
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    curvature = FullCurvature.of(expansion_of(kn.Model(net, kn.Gaussian(0.1)), (x, 5 * x), kind="hessian"))
    assert torch.linalg.eigvalsh(curvature.matrices[0])[0] > -1e-8
    assert "curves down" in curvature.notes[0]


def test_each_noise_has_its_own_part():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(outputs=2))
    params = {**model.params(), "likelihood.log_noise": torch.tensor([-1.0, 0.5], dtype=torch.float64)}
    expansion = expansion_of(model, (x, y), params=params)
    curvature = FullCurvature.of(expansion)
    assert curvature.matrices.shape[0] == 2
    torch.testing.assert_close(curvature.matrices.sum(0), dense_ggn(expansion))
    other = {**params, "likelihood.log_noise": torch.tensor([0.0, 0.3], dtype=torch.float64)}
    weights = torch.exp(2 * (params["likelihood.log_noise"] - other["likelihood.log_noise"]))
    moved = torch.einsum("o,ode->de", weights, curvature.matrices)
    torch.testing.assert_close(moved, dense_ggn(expansion_of(model, (x, y), params=other)))


class Pixels(nn.Module):
    """Three classes at every pixel of a line, from features that are not random."""

    def __init__(self):
        super().__init__()
        self.features, self.out = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.out(self.features(x).relu())


@pytest.mark.parametrize("bias", [True, False])
def test_a_head_is_summed_up_by_its_inputs(bias):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4, bias=bias)).double()
    data = torch.randn(7, 2, dtype=torch.float64), torch.randint(0, 4, (7,))
    expansion = expansion_of(kn.Model(net, kn.Categorical(), random="last_layer"), data)
    torch.testing.assert_close(FullCurvature.of(expansion).matrices[0], dense_ggn(expansion))


def test_a_head_over_pixels_is_summed_up_by_its_inputs_without_random_directions():
    data = torch.randn(4, 1, 6, dtype=torch.float64), torch.randint(0, 3, (4, 6))
    model = kn.Model(Pixels().double(), kn.Categorical(), random="last_layer")
    found = FullCurvature.of(expansion_of(model, data, most=2)).matrices[0]
    torch.testing.assert_close(found, dense_ggn(expansion_of(model, data)))


def test_a_head_with_a_noise_for_each_output_has_a_part_for_each():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    expansion = expansion_of(kn.Model(net, kn.Gaussian(outputs=2), random="last_layer"), (x, y))
    curvature = FullCurvature.of(expansion)
    assert curvature.matrices.shape[0] == 2
    torch.testing.assert_close(curvature.matrices.sum(0), dense_ggn(expansion))


def test_determinant_solution_and_covariance_are_those_of_the_precision():
    expansion = case_expansion("mlp")
    curvature, prior = FullCurvature.of(expansion), prior_precision(expansion)
    precision = dense_ggn(expansion) + torch.eye(expansion.layout.size, dtype=torch.float64)
    torch.testing.assert_close(curvature.log_det(prior, ONE), torch.logdet(precision))
    vector = torch.randn(len(precision), dtype=torch.float64)
    torch.testing.assert_close(curvature.solve(prior, ONE, vector), torch.linalg.solve(precision, vector))
    posterior = curvature.posterior(expansion, prior, ONE)
    torch.testing.assert_close(posterior.covariance, precision.inverse())


def test_a_flat_prior_on_weights_that_the_data_do_not_determine_is_refused():
    x = torch.ones(5, 2, dtype=torch.float64)
    expansion = expansion_of(kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(1.0), kn.Flat()), (x, x[:, :1]))
    with pytest.raises(kn.InvalidArgument, match="do not determine all weights"):
        FullCurvature.of(expansion).log_det(prior_precision(expansion), ONE)
