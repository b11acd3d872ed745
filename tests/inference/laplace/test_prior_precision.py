"""Tests of the prior's precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.laplace.curvature import prior_precision, touching_precision
from tests.core.cases import diagonal_posterior, full_posterior
from tests.inference.laplace.oracle import expansion_of

DTYPE = torch.float64


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
