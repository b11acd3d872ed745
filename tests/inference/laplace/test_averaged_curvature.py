"""Tests of curvatures averaged over draws of the posterior, and of priors that have axes of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.model.joint_normal import IndependentNormal
from knowable.core.model.structured_normal import KroneckerFactored
from knowable.inference.laplace.curvature import FullCurvature
from knowable.inference.laplace.expansion import ExpansionPoint
from knowable.inference.point.point import PointObjective
from knowable.testing import LinearGaussian

DTYPE = torch.float64


def class_rows(seed, rows=90, inputs=3, classes=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, dtype=DTYPE, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def under_its_own_posterior(seed):
    """A model whose prior is a Kronecker-factored posterior."""
    model = kn.Model(two_layers(), kn.Categorical(), kn.Normal(1.0))
    return kn.Laplace(epochs=30).fit(model, class_rows(seed)).as_prior(), class_rows(seed + 1)


# --- averages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_where_the_curvature_is_the_same_everywhere_averaging_changes_nothing(structure, seed):
    target = LinearGaussian.make(seed=seed)
    fits = [
        kn.Laplace(structure=structure, polish=5, epochs=30, rounds=rounds).fit(target.model(), target.data)
        for rounds in (0, 2)
    ]
    torch.testing.assert_close(target.as_flat(fits[1].std()), target.as_flat(fits[0].std()), rtol=1e-9, atol=0)
    assert fits[1].log_evidence == fits[0].log_evidence


def test_the_average_is_the_expected_curvature_by_quadrature(seed):
    """A logistic weight: the sum of x^2 p (1 - p) under a normal; each row has a draw of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 1, dtype=DTYPE, generator=generator)
    model = kn.Model(nn.Linear(1, 1, bias=False).double(), kn.Bernoulli(), kn.Normal(1.0))
    data = as_data((x, (x[:, 0] > 0).double()), model)
    normal = IndependentNormal(
        {"weight": torch.ones(1, 1, dtype=DTYPE)}, {"weight": torch.full((1, 1), 1.5, dtype=DTYPE)}
    )
    point = ExpansionPoint(model, data, model.params(), {}, "ggn", 64, 0)
    found = torch.stack(
        [FullCurvature.of(replace(point, around=normal, seed=number)).matrices[0, 0, 0] for number in range(200)]
    )
    nodes, shares = np.polynomial.hermite_e.hermegauss(60)
    p = torch.sigmoid(torch.from_numpy(1.0 + 1.5 * nodes).unsqueeze(1) * x[:, 0])
    expected = torch.from_numpy(shares / shares.sum()) @ (x[:, 0].square() * p * (1 - p)).sum(1)
    assert (found.mean() - expected).abs() < 4 * found.std() / len(found) ** 0.5


def test_a_network_that_is_sure_of_its_rows_is_less_sure_beside_the_mode():
    """Eight rows told apart without doubt: the curvature at the mode is next to nothing, beside it is not."""
    x = torch.linspace(-4, 4, 8, dtype=DTYPE).unsqueeze(1)
    model = kn.Model(nn.Linear(1, 1).double(), kn.Bernoulli(), kn.Normal(5.0))
    data = x, (x[:, 0] > 0).double()
    at_mode, beside = (kn.Laplace(structure="full", rounds=rounds).fit(model, data) for rounds in (0, 1))
    assert beside.std()["weight"] < 0.8 * at_mode.std()["weight"]


def test_averages_of_hessians_are_refused():
    with pytest.raises(kn.InvalidArgument, match="rounds=1 needs curvature='ggn' or 'empirical_fisher'"):
        kn.Laplace(structure="full", curvature="hessian", rounds=1)


# --- the axes of a prior ---------------------------------------------------------------------------------------------


def test_loss_and_gradient_along_the_axes_of_the_prior_are_those_of_the_weights(seed):
    prior, (x, y) = under_its_own_posterior(seed)
    model = kn.Model(two_layers(), kn.Categorical(), prior)
    objective = PointObjective(model, len(x), use_prior=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in objective.values:
            value += 0.1 * torch.randn(value.shape, dtype=DTYPE, generator=generator)
    loss, terms = objective(x, y)
    loss.backward()
    params = {name: value.detach().requires_grad_() for name, value in objective.params().items()}
    expected = -model.log_joint(params, x, y, len(x)) / len(x)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(terms["log_prior"], model.log_prior(params), rtol=1e-10, atol=0)
    gradients = dict(zip(params, torch.autograd.grad(expected, list(params.values())), strict=True))
    axes = objective.axes
    assert axes is not None
    turned = axes.coordinates({name: axes.normal.means[name] + g for name, g in gradients.items()})
    for name, value in zip(objective.names, objective.values, strict=True):
        torch.testing.assert_close(value.grad, turned[name], rtol=1e-8, atol=1e-10)


def test_the_first_weights_along_the_axes_are_those_of_the_network(seed):
    prior, (x, _) = under_its_own_posterior(seed)
    model = kn.Model(two_layers(), kn.Categorical(), prior)
    found = PointObjective(model, len(x), use_prior=True).params()
    for name, value in model.params().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_effective_parameters_under_a_posterior_are_the_trace_of_covariance_times_curvature(seed):
    prior, data = under_its_own_posterior(seed)
    second = kn.Laplace(epochs=30).fit(kn.Model(two_layers(), kn.Categorical(), prior), data)
    assert isinstance(second.normal, KroneckerFactored)
    layout = second.normal.layout
    before, after = (each.dense(layout)[1] for each in (prior.normal, second.normal))
    found = layout.size - torch.linalg.solve(after, before).trace()
    # of a sum of Kronecker products only the diagonal along the common axes is kept: of the prior too
    assert 0 < second.diagnostics["effective_parameters"] < layout.size
    assert second.diagnostics["effective_parameters"] == pytest.approx(found.item(), rel=0.3)
