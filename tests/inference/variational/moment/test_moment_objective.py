"""Tests of the bound by moments: exact where everything is linear, and without noise everywhere."""

from __future__ import annotations

import math

import pytest
import torch

import knowable as kn
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.moment.algebra import Moments
from knowable.inference.variational.moment.moment import MomentObjective, likelihood_moments
from knowable.testing import LinearGaussian, network_case
from tests.inference.variational.oracle import expected_log_likelihood, loss_gradient


def test_loss_is_the_closed_form_bound_of_a_linear_model(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = MomentObjective(problem.model(), problem.x, 20, initial_scale=0.2)
    loc, scale = objective.loc_and_scale()
    flat = problem.as_flat(loc), problem.as_flat(scale)
    loss, terms = objective(*problem.data)
    assert loss.item() == pytest.approx(-problem.elbo(*flat) / 20, rel=1e-10)
    assert terms["expected_log_likelihood"].item() == pytest.approx(expected_log_likelihood(problem, *flat), rel=1e-10)
    assert terms["kl"].item() == pytest.approx(kn.Normal(1.0).kl_from_normal(*flat).item(), rel=1e-10)


def test_gradient_is_the_closed_form_gradient(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    objective = MomentObjective(problem.model(), problem.x, 20, initial_scale=0.2)
    loc, scale = (problem.as_flat(each) for each in objective.loc_and_scale())
    objective(*problem.data)[0].backward()
    parts = [problem.as_flat(objective.layout.views(each)) for each in objective.q.grad]
    torch.testing.assert_close(torch.cat(parts), loss_gradient(problem, loc, scale))


def test_loss_has_no_noise_and_draws_nothing(seed):
    case = network_case("mlp")
    objective = MomentObjective(case.model(), case.x, 16)
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    losses = {objective(*case.data)[0].item() for _ in range(3)}
    assert len(losses) == 1
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("limit", [64, 0], ids=["covariances", "variances"])
def test_loss_of_a_network_is_near_the_mean_over_draws(seed, limit):
    # one hidden layer: moments of the output are exact, so what is left is the error of 500 draws
    case = network_case("mlp", dtype=torch.float64)
    moment = MomentObjective(case.model(), case.x, 16, initial_scale=0.1, limit=limit)
    usual = MeanFieldObjective(case.model(), case.x, 16, estimator="weight", initial_scale=0.1)
    torch.manual_seed(seed)
    with torch.no_grad():
        losses = torch.stack([usual(*case.data)[0] for _ in range(500)])
    error = losses.std().item() / math.sqrt(500)
    assert abs(moment(*case.data)[0].item() - losses.mean().item()) < 4.5 * error + 1e-4


def test_batches_are_unbiased_for_the_whole(seed):
    problem = LinearGaussian.make(n=24, seed=seed)
    objective = MomentObjective(problem.model(), problem.x, 24)
    whole = objective(*problem.data)[0].item()
    parts = [objective(x, y)[0].item() for x, y in zip(*(v.split(6) for v in problem.data), strict=True)]
    assert sum(parts) / len(parts) == pytest.approx(whole, rel=1e-12)


def test_own_parameters_of_the_likelihood_come_with_their_spread():
    model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian())
    spread = Moments(torch.tensor(-1.0), torch.tensor(0.04))
    assert likelihood_moments(model, {"likelihood.log_noise": spread}) == {"log_noise": spread}
    point = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(), random=["weight", "bias"])
    found = likelihood_moments(point, {"likelihood.log_noise": Moments(torch.tensor(-1.0))})
    assert found["log_noise"].variance is None
    frozen = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(), frozen="likelihood.*")
    assert likelihood_moments(frozen, {})["log_noise"].mean == -1.0


def test_what_has_no_rule_is_refused_before_training():
    case = network_case("batchnorm_mlp")
    with pytest.raises(kn.Unsupported, match="BatchNorm1d"):
        MomentObjective(case.model(), case.x, 16)
