"""The Student t at the mode: its density, its curvature, its refitting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import knowable as kn
from knowable.core.chains.target import DensityTarget, ModelTarget
from knowable.core.compiling import recorder as batched_gradient
from knowable.core.model.data import as_data
from knowable.core.network.params import Layout
from knowable.inference.sampling.importance_weights import effective_sample_size
from knowable.inference.sampling.mode import (
    StudentTProposal,
    inverse_root,
    laplace_proposal,
    negative_hessian,
    refitted,
)
from knowable.testing import LinearGaussian
from knowable.testing.densities import banana, correlated_gaussian
from knowable.testing.networks import network_case


def model_target(model: kn.Model, data) -> ModelTarget:
    return ModelTarget(model, as_data(data, model), points={}, buffers=model.buffers())


def test_log_density_is_that_of_scipy_and_of_the_draws(generator):
    factor = torch.tensor([[2.0, 0.0], [0.5, 0.3]], dtype=torch.float64)
    loc = torch.tensor([1.0, -3.0], dtype=torch.float64)
    proposal = StudentTProposal(loc, factor, 4.0)
    position, log_q = proposal.draw(500, generator)
    expected = stats.multivariate_t(loc.numpy(), (factor @ factor.T).numpy(), df=4).logpdf(position.numpy())
    np.testing.assert_allclose(log_q.numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(proposal.log_prob(position).numpy(), expected, rtol=1e-10)
    first = (position[:, 0].numpy() - 1.0) / 2.0
    assert stats.kstest(first, stats.t(4).cdf).pvalue > 1e-4


def test_proposal_for_a_linear_model_is_its_posterior():
    problem = LinearGaussian.make(n=40, d=3)
    target = model_target(problem.model(), problem.data)
    proposal = laplace_proposal(target, torch.zeros(1, 4, dtype=torch.float64), df=5.0)
    assert torch.allclose(proposal.loc, problem.mean, atol=1e-5)
    assert torch.allclose(proposal.factor @ proposal.factor.T, torch.linalg.inv(problem.precision), atol=1e-8)


def test_mode_is_found_far_away_and_in_any_units():
    scale = torch.logspace(-3, 3, 5, dtype=torch.float64)
    place = torch.arange(5.0, dtype=torch.float64) * 10 - 20

    def density(params):
        z = (params["x"] - place) / scale
        return -0.5 * z.square().sum() - 0.1 * (z**4).sum()

    target = DensityTarget(density, Layout.of({"x": place}))
    proposal = laplace_proposal(target, torch.full((1, 5), 3.0, dtype=torch.float64), df=5.0)
    assert (((proposal.loc - place) / scale).abs() < 1e-3).all()
    assert torch.allclose(proposal.factor.square().sum(1).sqrt(), scale, rtol=1e-4)


@pytest.mark.parametrize("name", ["mlp", "batchnorm_cnn", "transformer", "tied"])
def test_hessian_agrees_with_differences_of_the_gradient(name):
    case = network_case(name, dtype=torch.float64)
    model = case.model()
    target = model_target(model, case.data)
    start = target.layout.flatten({k: model.params()[k] for k in target.layout.names})
    hessian = negative_hessian(target, start)
    direction = torch.randn(len(start), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step = 1e-5 * direction / direction.norm()
    both = target.value_and_grad(torch.stack([start + step, start - step]))[1]
    expected = -(both[0] - both[1]) / 2
    assert torch.allclose(hessian @ step, expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


def test_inverse_root_inverts_and_mends_what_is_not_positive():
    matrix = torch.tensor([[4.0, 1.0], [1.0, 1e-6]], dtype=torch.float64)
    good = matrix @ matrix.T
    root = inverse_root(good)
    assert torch.allclose(root @ root.T @ good, torch.eye(2, dtype=torch.float64), atol=1e-3)
    saddle = torch.tensor([4.0, -0.25, 0.0], dtype=torch.float64).diag()
    root = inverse_root(saddle)
    assert torch.isfinite(root).all()
    assert torch.allclose((root @ root.T).diagonal()[:2], torch.tensor([0.25, 4.0], dtype=torch.float64))


def test_refitting_leaves_a_good_proposal_and_mends_a_shifted_one(generator):
    density = correlated_gaussian(3)
    target = DensityTarget(density.log_density, Layout.of(density.start()))
    good = laplace_proposal(target, density.mean.unsqueeze(0), df=5.0)
    assert refitted(good, target.value, rounds=5, generator=generator) is good
    shifted = StudentTProposal(density.mean + 3 * density.covariance.diagonal().sqrt(), 0.3 * good.factor, 5.0)
    mended = refitted(shifted, target.value, rounds=8, generator=generator)

    def worth(proposal):
        position, log_q = proposal.draw(2000, generator)
        return effective_sample_size(target.value(position) - log_q)

    assert worth(mended) > 10 * worth(shifted) and worth(mended) > 400


def test_refitting_widens_a_proposal_that_misses_the_bends(generator):
    density = banana()
    target = DensityTarget(density.log_density, Layout.of(density.start()))
    start = laplace_proposal(target, density.mean.unsqueeze(0), df=5.0)
    found = refitted(start, target.value, rounds=5, generator=generator)
    assert found.factor[1].norm() > 1.5 * start.factor[1].norm()  # the parabola's height, unseen at the mode
    assert refitted(start, target.value, rounds=0, generator=generator) is start


def test_effective_size_counts_equal_weights():
    assert effective_sample_size(torch.zeros(7, dtype=torch.float64)) == pytest.approx(7)
    weights = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)
    assert effective_sample_size(weights) == pytest.approx(2)
    assert effective_sample_size(torch.tensor([900.0, 0.0], dtype=torch.float64)) == pytest.approx(1)


def test_a_density_without_curvature_gives_a_finite_proposal():
    target = DensityTarget(lambda p: p["x"].sum() * 0.0, Layout.of({"x": torch.zeros(2)}))
    proposal = laplace_proposal(target, torch.zeros(1, 2, dtype=torch.float64), df=5.0)
    assert torch.isfinite(proposal.factor).all()


def test_second_derivatives_that_are_no_numbers_are_taken_from_differences():
    def density(params):  # its second derivative by autograd is nan
        return torch.logaddexp(-0.5 * (params["x"] - 8) ** 2, -0.5 * (params["x"] + 800) ** 2)

    target = DensityTarget(density, Layout.of({"x": torch.zeros(())}))
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 0.02)):
        proposal = laplace_proposal(target, torch.tensor([[5.0]], dtype=dtype), df=5.0)
        assert proposal.loc.item() == pytest.approx(8.0, abs=0.01)
        assert proposal.factor.abs().item() == pytest.approx(1.0, rel=tolerance)


def test_float32_networks_are_climbed_too():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30).unsqueeze(1)
    model = kn.Model(nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)), kn.Gaussian(0.2))
    target = model_target(model, (x, torch.sin(3 * x)))
    start = target.layout.flatten(model.params()).unsqueeze(0)
    proposal = laplace_proposal(target, start, df=5.0)
    _, gradient = target.value_and_grad(proposal.loc.float().unsqueeze(0))
    step = proposal.factor.T @ gradient[0].double()
    assert step.norm() < 0.2  # less than a fifth of a standard deviation from the mode


def test_nothing_is_compiled_for_the_search(monkeypatch):
    def compiled(*_):
        raise AssertionError

    monkeypatch.setattr(batched_gradient, "compiled", compiled)
    density = banana()
    target = DensityTarget(density.log_density, Layout.of(density.start()), mode="compiled")
    for _ in range(10):  # more than a hundred gradients, one after the other
        laplace_proposal(target, torch.full((1, 2), 3.0, dtype=torch.float64), df=5.0)
    assert target.gradients > 150 and target.function.compiling
