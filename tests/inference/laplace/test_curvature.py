"""Tests of the full curvature matrix, of the prior's precision and of second moments: dense products are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.laplace.curvature import FullCurvature, prior_precision, second_moment, touching_precision
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.testing.networks import ONE_INPUT
from tests.core.cases import diagonal_posterior, full_posterior
from tests.inference.laplace.oracle import case_expansion, dense_ggn, expansion_of, gradients

DTYPE = torch.float64
ONE = torch.ones(1, dtype=DTYPE)


@pytest.mark.parametrize("name", ONE_INPUT)
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
    assert "negative eigenvalues" in curvature.notes[0]


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
    posterior = LaplacePosterior(expansion.model, curvature.normal(expansion, prior, ONE))
    torch.testing.assert_close(posterior.covariance, precision.inverse())


def test_a_flat_prior_on_weights_that_the_data_do_not_determine_is_refused():
    x = torch.ones(5, 2, dtype=torch.float64)
    expansion = expansion_of(kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(1.0), kn.Flat()), (x, x[:, :1]))
    with pytest.raises(kn.InvalidArgument, match="do not determine all weights"):
        FullCurvature.of(expansion).log_det(prior_precision(expansion), ONE)


# --- the prior's precision


def expansion_with(prior, likelihood=None):
    net = nn.Linear(2, 1).double()
    x = torch.randn(5, 2, dtype=DTYPE)
    return expansion_of(kn.Model(net, likelihood or kn.Gaussian(0.1), prior), (x, x[:, :1]))


def test_normal_priors_by_glob_have_their_own_numbers():
    prior = prior_precision(expansion_with({"weight": kn.Normal(0.5), "bias": kn.Flat()}))
    assert (prior.by_name["weight"], prior.by_name["bias"]) == (4.0, 0.0)
    torch.testing.assert_close(prior.flat, torch.tensor([4.0, 4.0, 0.0], dtype=DTYPE))
    torch.testing.assert_close(prior.dense(), prior.flat.diag())


def test_learned_scales_are_those_of_the_settings_and_differentiable():
    expansion = expansion_with(kn.EmpiricalBayes(kn.Normal(1.0)))
    scale = torch.tensor(0.5, dtype=DTYPE, requires_grad=True)
    prior = prior_precision(expansion, {"prior.*.log_scale": scale})
    torch.testing.assert_close(prior.by_name["weight"], torch.exp(-2 * scale))
    (slope,) = torch.autograd.grad(prior.flat.sum(), scale)
    torch.testing.assert_close(slope, -6 * torch.exp(-2 * scale.detach()))


@pytest.mark.parametrize(
    ("prior", "precision"),
    [
        (kn.Normal(0.7), lambda w: torch.full_like(w, 1 / 0.49)),
        (kn.LaplacePrior(0.5), lambda w: 1 / (0.5 * w.abs())),
        (kn.StudentTPrior(3.0, 2.0), lambda w: 4.0 / (3.0 * 4.0 + w**2)),
        (kn.LogUniform(), lambda w: 1 / w**2),
    ],
    ids=["normal", "laplace", "student", "log uniform"],
)
def test_the_touching_normal_has_the_priors_slope(prior, precision):
    value = torch.tensor([-1.5, 0.2, 3.0], dtype=DTYPE)
    torch.testing.assert_close(touching_precision(prior, value), precision(value))


@pytest.mark.parametrize("prior", [kn.LaplacePrior(0.5), kn.StudentTPrior(3.0), kn.ScaleMixture()], ids=repr)
def test_the_touching_normal_is_below_the_prior_and_touches_it(prior):
    # a lower bound of log p: a - precision w² / 2 with equality at the point and nowhere above
    place, grid = torch.tensor([0.8], dtype=DTYPE), torch.linspace(-5, 5, 201, dtype=DTYPE)
    precision = touching_precision(prior, place)
    bound = prior.log_prob(place) - 0.5 * precision * (grid**2 - place**2)
    assert (bound <= prior.log_prob(grid) + 1e-9).all()


def test_at_zero_it_is_finite():
    for prior in (kn.LaplacePrior(0.5), kn.StudentTPrior(), kn.Horseshoe()):
        assert torch.isfinite(touching_precision(prior, torch.zeros(2, dtype=DTYPE))).all()


def test_a_prior_that_is_not_normal_is_noted():
    assert prior_precision(expansion_with(kn.Normal(1.0))).notes == ()
    assert "LaplacePrior is not normal" in prior_precision(expansion_with(kn.LaplacePrior(1.0))).notes[0]


def test_a_posterior_keeps_its_correlations(generator):
    model = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.1))
    posterior = full_posterior(model, generator)
    prior = prior_precision(expansion_with(posterior))
    torch.testing.assert_close(prior.dense(), posterior.covariance.inverse())
    torch.testing.assert_close(prior.flat, posterior.covariance.inverse().diagonal())
    independent = diagonal_posterior(model, generator)
    found = prior_precision(expansion_with(independent))
    assert found.joint is None
    torch.testing.assert_close(found.flat, Layout.of(independent.scale).flatten(independent.scale) ** -2)


def test_a_posterior_that_ties_the_noise_to_the_weights_is_conditioned_on_it(generator):
    model = kn.Model(nn.Linear(2, 1).double(), kn.Gaussian())
    posterior = full_posterior(model, generator)
    prior = prior_precision(expansion_with(posterior, kn.Gaussian()))
    whole = posterior.covariance.inverse()
    torch.testing.assert_close(prior.dense(), whole[:3, :3])


# --- second moments


@pytest.mark.parametrize("shape", [(7, 3), (2, 5, 3), (4, 1, 6), (2, 3, 9, 2), (11, 1, 300), (9, 1_100), (2, 3, 260)])
def test_the_sum_of_outer_products_is_that_of_one_product(shape):
    values = torch.randn(shape, dtype=torch.float64)
    flat = values.reshape(-1, shape[-1])
    torch.testing.assert_close(second_moment(values), flat.T @ flat)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 4, 150), (2, 3, 9, 2), (5, 3, 2, 400)])
def test_features_may_come_first_in_memory(shape):
    values = torch.randn((*shape[:-2], shape[-1], shape[-2]), dtype=torch.float64).mT
    flat = values.reshape(-1, shape[-1])
    torch.testing.assert_close(second_moment(values), flat.T @ flat)


def test_it_is_symmetric_to_the_last_bit():
    found = second_moment(torch.randn(50, 700))
    assert torch.equal(found, found.T)
