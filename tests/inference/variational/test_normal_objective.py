"""The bound of independent normals; its estimators are tested with mean-field inference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Params
from knowable.inference.variational.objective import FlatNormalObjective, NormalObjective
from knowable.testing import LinearGaussian

X = torch.zeros(3, 2, dtype=torch.float64)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


class Halves(NormalObjective):
    """Normals whose standard deviation is half of their mean."""

    def __init__(self, model, x, size, **common):
        super().__init__(model, x, size, **common)
        self.loc = nn.Parameter(self.layout.flatten(self.first))

    def loc_and_scale(self) -> tuple[Params, Params]:
        return self.layout.views(self.loc), self.layout.views(0.5 * self.loc.abs())

    def divergence(self) -> Tensor:
        return 0.5 * self.loc.square().sum()

    def draw(self, noise: Tensor) -> tuple[Tensor, Params, Params, list[Params]]:
        split = self.drawn.size
        local, drawn = self.loc[split:], self.loc[:split]
        draws = [self.drawn.views(drawn + 0.5 * drawn.abs() * each) for each in noise]
        return self.divergence(), self.local.views(local), self.local.views(0.25 * local.square()), draws


@pytest.mark.parametrize("estimator", ["weight", "auto"])
def test_a_parameterisation_of_its_own_has_the_closed_form_bound_of_a_linear_model(seed, estimator):
    # the mean of 400 losses against the closed form, within 4.5 standard errors
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = Halves(problem.model(), problem.x, 20, estimator=estimator)
    loc, scale = (problem.as_flat(each).detach() for each in objective.loc_and_scale())
    found = torch.stack([objective(*problem.data)[1]["expected_log_likelihood"] for _ in range(400)])
    prior = sum(kn.Normal(problem.prior_scale).kl_from_normal(m, s) for m, s in zip(loc, scale, strict=True))
    expected = problem.elbo(loc, scale) + prior
    assert abs(found.mean().item() - float(expected)) < 4.5 * found.std().item() / 20


def test_draws_entropy_and_posterior_are_those_of_means_and_scales(generator):
    objective = Halves(kn.Model(network(), kn.Gaussian(0.1)), X, 10, estimator="weight")
    loc, scale = (objective.layout.flatten(each).detach() for each in objective.loc_and_scale())
    normal = torch.distributions.Normal(loc, scale)
    torch.testing.assert_close(objective.entropy().detach(), normal.entropy().sum())
    posterior = objective.posterior()
    torch.testing.assert_close(objective.layout.flatten(posterior.std()), scale)
    draws = torch.stack([objective.layout.flatten(each) for each in objective.draw_weights(4000)]).detach()
    assert ((draws.mean(0) - loc).abs() < 5 * scale / 4000**0.5).all()


def test_log_uniform_priors_are_one_stretch_with_a_gradient_by_hand():
    model = kn.Model(network(), kn.Gaussian(0.1), {"*.bias": kn.Horseshoe(), "*": kn.LogUniform()})
    objective = FlatNormalObjective(model, X, 10, estimator="local")
    assert set(objective.others) == {"0.bias", "2.bias"}
    sizes = [each.stop - each.start for each in objective.plan.stretches if type(each).__name__ == "LogUniformStretch"]
    assert sizes == [9]


@pytest.mark.parametrize("recording", [False, True])
def test_loss_and_gradient_under_log_uniform_priors_are_those_of_autograd(seed, recording):
    model = kn.Model(network(), kn.Gaussian(0.1), kn.LogUniform())
    objective = FlatNormalObjective(model, X, 10, estimator="weight", initial_scale=0.3)
    objective.recording = recording
    kl, *_ = objective.draw(torch.randn(1, objective.drawn.size, dtype=torch.float64))
    loc, scale = (objective.layout.flatten(each) for each in objective.loc_and_scale())
    expected = kn.LogUniform().kl_from_normal(loc, scale)
    torch.testing.assert_close(kl, expected)
    found = torch.autograd.grad(kl, objective.q)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected, objective.q)[0])
