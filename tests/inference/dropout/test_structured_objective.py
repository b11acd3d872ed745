from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

import knowable as kn
from knowable.inference.dropout.structured_dropout import StructuredDropoutObjective, normal_divergence
from tests.inference.dropout.networks import Recurrent, perceptron

PRIORS = ["log_uniform", "horseshoe"]
ROWS = 12


def objective_for(net: nn.Module, x: Tensor, prior: str, **settings) -> StructuredDropoutObjective:
    """With noise that is wide, and not the same on all units."""
    model = kn.Model(net, kn.Gaussian(0.5), kn.Normal(2.0))
    objective = kn.StructuredDropout(prior, **settings).objective(model, x, len(x))
    with torch.no_grad():
        for value in [*objective.noises.parameters(), *objective.log_scales]:  # type: ignore[attr-defined]
            value.copy_(-0.8 * torch.rand_like(value) - 0.2)
    return objective


def linear_problem() -> tuple[nn.Linear, Tensor, Tensor]:
    return nn.Linear(3, 1).double(), torch.randn(ROWS, 3).double(), torch.randn(ROWS, 1).double()


def exact_log_likelihood(objective: StructuredDropoutObjective, x: Tensor, y: Tensor) -> Tensor:
    """Over independent factors of the units, from mean and variance of each weight."""
    posterior = objective.posterior()
    mean, std = posterior.mean(), posterior.std()
    away = (y - x @ mean["weight"].T - mean["bias"]).square()
    return Normal(0, 0.5).log_prob(torch.zeros(()).double()) - (away + x.square() @ std["weight"].T.square()) / 0.5


@pytest.mark.parametrize("prior", PRIORS)
def test_the_loss_of_a_linear_model_is_the_exact_bound(prior, seed):
    net, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    if prior == "horseshoe":  # factors of units are independent if that of the layer is a point
        with torch.no_grad():
            next(iter(objective.noises)).global_log_scale.fill_(-20.0)  # type: ignore[operator]
    with torch.no_grad():
        kl, prior_of_points = objective.kl_divergence(), objective(x, y)[1]["log_prior_of_points"]
        expected = -exact_log_likelihood(objective, x, y).mean() + (kl - prior_of_points) / ROWS
        found = torch.stack([objective(x.repeat(50, 1), y.repeat(50, 1))[0] for _ in range(40)])
    assert (found.mean() - expected).abs() < 5.5 * found.std() / math.sqrt(len(found))


@pytest.mark.parametrize("prior", PRIORS)
def test_examples_and_weight_draws_have_the_same_expectation(prior, seed):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    _, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    n = 400
    with torch.no_grad():
        many = [objective(x.repeat(20, 1), y.repeat(20, 1))[1]["expected_log_likelihood"] for _ in range(n // 20)]
        by_example = torch.stack(many)
        draws = objective.draw_weights(n)
        by_weight = torch.stack([objective.model.log_likelihood(draw, x, y).sum() for draw in draws])
    error = math.sqrt(by_example.var() / len(by_example) + by_weight.var() / n)
    assert abs(by_example.mean() - by_weight.mean()) < 6 * error  # of twenty batches, and of many draws


def test_the_divergence_of_normals_is_the_closed_form():
    loc, log_scale, of_prior = torch.randn(3, 20).double().unbind()
    own, prior = Normal(loc, log_scale.exp()), Normal(torch.zeros_like(loc), of_prior.exp())
    assert torch.allclose(normal_divergence(loc, log_scale, of_prior), kl_divergence(own, prior))


def test_the_divergence_of_the_horseshoe_does_not_depend_on_the_coordinates():
    # KL of u = z̄ v to N(0, z̄²) is that of v to N(0, 1): what the paper writes
    net, x, _ = linear_problem()
    objective = objective_for(net, x, "horseshoe")
    (noise,) = objective.noises
    median = noise.log_prior_scale().exp()  # type: ignore[union-attr]
    v = objective.means()["weight"] / median, objective.scales()["weight"] / median
    expected = noise.divergence() + kl_divergence(Normal(*v), Normal(0.0, 1.0)).sum()
    assert torch.isclose(objective.kl_divergence(), expected)


@pytest.mark.parametrize("prior", PRIORS)
def test_point_estimates_have_the_models_prior(prior):
    net, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    own = Normal(torch.tensor(0.0).double(), 2.0)
    expected = own.log_prob(net.bias).sum()
    if prior == "log_uniform":
        expected = expected + own.log_prob(net.weight).sum()
    assert torch.isclose(objective(x, y)[1]["log_prior_of_points"], expected)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("net", [perceptron(0.5), Recurrent()], ids=["dropout layers", "recurrent"])
def test_without_noise_the_network_is_itself_and_its_dropout_off(prior, net):
    x = torch.randn(5, 3) if isinstance(net, nn.Sequential) else torch.randn(5, 4, 2)
    objective = objective_for(net, x, prior)
    with torch.no_grad():
        for noise in objective.noises:
            for name, value in noise.named_parameters():
                value.fill_(-20.0 if "log_scale" in name else 0.0)
        for value in objective.log_scales:
            value.fill_(-20.0)
        y = objective.model.forward(objective.model.params(), x)
        found = objective(x, y)[1]["expected_log_likelihood"]
        expected = objective.model.log_likelihood(objective.model.params(), x, y).sum()
    assert torch.isclose(found, expected, atol=1e-3)


def test_several_draws_are_averaged(seed):
    net, x, y = linear_problem()
    one, four = (objective_for(net, x, "log_uniform", draws=draws) for draws in (1, 4))
    four.load_state_dict(one.state_dict())
    torch.manual_seed(seed)
    each = torch.stack([one(x, y)[0] for _ in range(4)])
    torch.manual_seed(seed)
    assert torch.isclose(four(x, y)[0], each.mean())


@pytest.mark.parametrize("prior", PRIORS)
def test_every_parameter_has_a_gradient(prior):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    _, x, y = linear_problem()
    objective = objective_for(net, x, prior)
    objective(x, y)[0].backward()
    assert all(value.grad is not None and torch.isfinite(value.grad).all() for value in objective.parameters())
