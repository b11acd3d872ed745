from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.divergence import (
    NormalSegment,
    fixed_normal,
    monte_carlo_kl,
    prior_segments,
    remaining_kl,
)
from knowable.inference.variational.mean_field import MeanFieldObjective
from tests.inference.variational.oracle import integrated_kl

X = torch.zeros(2, 2, dtype=torch.float64)
PROPER = [
    kn.Normal(0.7),
    kn.Normal(2.0, loc=-0.5),
    kn.LaplacePrior(0.4),
    kn.StudentTPrior(3.0, scale=0.5),
    kn.ScaleMixture(0.3, 1.0, 0.1),
    kn.Horseshoe(0.5),
    kn.EmpiricalBayes(kn.Normal(0.7)),
    kn.EmpiricalBayes(kn.LaplacePrior(0.4)),
    kn.EmpiricalBayes(kn.StudentTPrior(3.0, scale=0.5)),
]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def scattered(model: kn.Model, generator: torch.Generator) -> MeanFieldObjective:
    """The objective at random means and scales."""
    objective = MeanFieldObjective(model, X, 10)
    with torch.no_grad():
        objective.q[0].normal_(generator=generator)
        objective.q[1].normal_(-1.0, 0.5, generator=generator)
    return objective


def kl_by_parameter(objective: MeanFieldObjective) -> float:
    """Sum of the priors' own closed forms, one call a parameter."""
    loc, scale = objective.loc_and_scale()
    priors = {name: objective.model.prior.bound(name, objective.point_params()) for name in loc}
    return sum(priors[name].kl_from_normal(loc[name], scale[name]).item() for name in loc)


# --- priors of one shape ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", PROPER, ids=repr)
def test_divergence_of_one_weight_is_the_integral(prior):
    # closed forms to quadrature's own error; Monte Carlo within 4.5 standard errors of -log p(w) over the draws
    loc, scale = torch.tensor([0.4], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    expected = integrated_kl(prior, 0.4, 0.3)
    closed = prior.kl_from_normal(loc, scale)
    if closed is not None:
        assert closed.item() == pytest.approx(expected, abs=1e-6)
    draws = 20_000
    found = monte_carlo_kl(prior, loc, scale, draws).item()
    noise = torch.randn(draws, dtype=torch.float64)
    error = prior.log_prob(loc + scale * noise).std().item() / math.sqrt(draws)
    assert abs(found - expected) < 4.5 * error


def test_flat_prior_leaves_the_negative_entropy():
    loc, scale = torch.tensor([0.4], dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    assert kn.Flat().kl_from_normal(loc, scale).item() == pytest.approx(integrated_kl(kn.Flat(), 0.4, 0.3), abs=1e-8)


@pytest.mark.parametrize(("loc", "scale"), [(0.02, 0.4), (0.4, 0.3), (-2.0, 0.1)])
def test_log_uniform_differs_from_the_integral_by_one_constant(loc, scale):
    # the fit of Molchanov et al. is within 0.01 nat of the exact divergence, which is known up to a constant
    prior = kn.LogUniform()
    far = integrated_kl(prior, 1e-4, 1.0)  # the constant: a weight drowned in noise costs nothing
    found = prior.kl_from_normal(torch.tensor([loc]).double(), torch.tensor([scale]).double()).item()
    assert found == pytest.approx(integrated_kl(prior, loc, scale) - far, abs=0.02)


# --- priors by glob --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prior",
    [
        kn.Normal(0.7),
        kn.Flat(),
        kn.LaplacePrior(0.4),
        {"*.bias": kn.Flat(), "*": kn.Normal(0.5)},
        {"0.*": kn.Normal(0.5, loc=0.3), "2.weight": kn.LaplacePrior(0.2), "*": kn.Normal(2.0)},
        {"*.weight": kn.EmpiricalBayes(kn.Normal(0.5)), "*": kn.EmpiricalBayes(kn.LaplacePrior(1.0), per="parameter")},
        kn.LogUniform(),
    ],
    ids=repr,
)
def test_divergence_of_a_network_is_the_sum_over_its_parameters(generator, prior):
    objective = scattered(kn.Model(network(), kn.Gaussian(0.1), prior), generator)
    assert objective.kl_divergence().item() == pytest.approx(kl_by_parameter(objective), rel=1e-10)


def test_divergence_without_a_closed_form_is_estimated_without_bias(generator):
    # mean of 225 estimates against quadrature, within 4.5 standard errors of that mean
    prior = {"0.weight": kn.ScaleMixture(0.3, 1.0, 0.1), "0.bias": kn.Horseshoe(0.5), "*": kn.StudentTPrior()}
    objective = scattered(kn.Model(network(), kn.Gaussian(0.1), prior), generator)
    loc, scale = objective.loc_and_scale()
    expected = sum(
        integrated_kl(objective.model.prior.bound(name, {}), m, s)
        for name in loc
        for m, s in zip(loc[name].flatten().tolist(), scale[name].flatten().tolist(), strict=True)
    )
    found = torch.stack([objective.kl_divergence().detach() for _ in range(225)])
    assert abs(found.mean().item() - expected) < 4.5 * found.std().item() / 15


def test_divergence_to_a_learned_scale_has_its_gradient(generator):
    # d KL / d log t of N(m, s²) to N(0, t²), summed: Σ 1 - (s² + m²) / t²
    model = kn.Model(network(), kn.Gaussian(0.1), kn.EmpiricalBayes(kn.Normal(0.7)))
    objective = scattered(model, generator)
    (scale_of_prior,) = objective.points
    (gradient,) = torch.autograd.grad(objective.kl_divergence(), scale_of_prior)
    loc, scale = objective.q[0].detach(), objective.q[1].detach().exp()
    expected = (1 - (scale**2 + loc**2) / 0.7**2).sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-10)


def test_scale_given_as_a_tensor_counts_for_every_weight(generator):
    expected = scattered(kn.Model(network(), kn.Gaussian(0.1), kn.Normal(2.0)), generator)
    try:
        model = kn.Model(network(), kn.Gaussian(0.1), kn.Normal(torch.tensor(2.0, dtype=torch.float64)))
    except kn.KnowableError:
        return  # refusing tensors from users is as good
    objective = MeanFieldObjective(model, X, 10)
    with torch.no_grad():
        objective.q.copy_(expected.q)
    assert objective.kl_divergence().item() == pytest.approx(expected.kl_divergence().item(), rel=1e-12)


# --- a posterior as the prior ----------------------------------------------------------------------------------------


def random_normal(model: kn.Model, generator: torch.Generator) -> tuple[Layout, Tensor, Tensor]:
    layout = Layout.of(model.params())
    loc = torch.randn(layout.size, generator=generator, dtype=torch.float64)
    factor = 0.3 * torch.randn(layout.size, layout.size, generator=generator, dtype=torch.float64).tril()
    factor.diagonal().copy_(0.5 + torch.rand(layout.size, generator=generator, dtype=torch.float64))
    return layout, loc, factor


@pytest.mark.parametrize("full", [False, True], ids=["independent", "correlated"])
def test_divergence_to_a_posterior_is_that_of_two_normals(generator, full):
    net, likelihood = network(), kn.Gaussian(0.1)
    layout, loc, factor = random_normal(kn.Model(net, likelihood), generator)
    if full:
        posterior = kn.FullNormal(kn.Model(net, likelihood), layout, loc, factor)
    else:
        factor = factor.diagonal().diag()
        posterior = kn.DiagonalNormal(
            kn.Model(net, likelihood), layout.views(loc), layout.views(factor.diagonal().contiguous())
        )
    objective = scattered(kn.Model(net, likelihood, posterior), generator)
    means, scales = (layout.flatten(each).detach() for each in objective.loc_and_scale())
    expected = kl_divergence(
        MultivariateNormal(means, scale_tril=scales.diag()), MultivariateNormal(loc, scale_tril=factor)
    )
    assert objective.kl_divergence().item() == pytest.approx(expected.item(), rel=1e-9)


# --- segments -------------------------------------------------------------------------------------------------------


def test_neighbours_under_one_prior_are_joined():
    model = kn.Model(network(), kn.Gaussian(0.1), {"2.*": kn.Normal(3.0), "*": kn.Normal(1.0)})
    layout = Layout.of({name: model.params()[name] for name in model.random_names})
    segments = prior_segments(layout, model)[0]
    assert [(each.start, each.stop) for each in segments] == [(0, 6), (6, 9)]
    loc, log_scale = torch.randn(2, 9, dtype=torch.float64)
    expected = kn.Normal(1.0).kl_from_normal(loc[:6], log_scale[:6].exp())
    expected = expected + kn.Normal(3.0).kl_from_normal(loc[6:], log_scale[6:].exp())
    found = sum(each.value(loc, log_scale, log_scale.exp()).item() for each in segments)
    assert found == pytest.approx(expected.item(), rel=1e-12)


def test_segments_cover_what_has_no_closed_form_with_nothing():
    model = kn.Model(network(), kn.Gaussian(0.1), {"0.*": kn.Horseshoe(), "*": kn.Normal(1.0)})
    layout = Layout.of({name: model.params()[name] for name in model.random_names})
    first, second = prior_segments(layout, model)[0]
    loc = torch.randn(9, dtype=torch.float64)
    assert first.value(loc, loc, loc.exp()).item() == 0.0
    assert second.value(loc, loc, loc.exp()).item() != 0.0


@pytest.mark.parametrize("kind", ["number", "tensor", "flat"])
def test_gradient_of_a_segment_is_that_of_its_value(generator, kind):
    mean: float | Tensor = 0.3
    precision: float | Tensor = 0.0 if kind == "flat" else 2.5
    if kind == "tensor":
        mean, precision = (torch.rand(4, generator=generator, dtype=torch.float64) for _ in range(2))
    segment = NormalSegment(2, 6, mean, precision, 1.0, 0.7)
    loc = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    log_scale = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    value = 1.5 * segment.value(loc, log_scale, log_scale.exp())
    expected = torch.stack(torch.autograd.grad(value, (loc, log_scale)))
    found = torch.zeros(2, 8, dtype=torch.float64)
    segment.write_gradient(found, loc.detach(), log_scale.detach().exp(), 1.5)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_only_fixed_normal_priors_have_a_segment():
    assert fixed_normal(kn.Normal(2.0, loc=1.0)) == (1.0, 0.25)
    assert fixed_normal(kn.Flat()) == (0.0, 0.0)
    assert fixed_normal(kn.EmpiricalBayes(kn.Normal(2.0))) is None
    assert fixed_normal(kn.LaplacePrior()) is None
    assert fixed_normal(None) is None


def test_nothing_left_over_costs_nothing():
    model = kn.Model(network(), kn.Gaussian(0.1))
    assert remaining_kl(model, [], {}, {}, {}, 1).item() == 0.0
