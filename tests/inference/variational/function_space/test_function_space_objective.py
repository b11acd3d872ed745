from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import knowable as kn
from knowable.inference.variational.function_space.function_space import process_divergence
from knowable.testing import LinearGaussian
from tests.inference.variational.oracle import expected_log_likelihood


def covariance(n: int, outputs: int) -> Tensor:
    root = torch.randn(outputs, n, n + 2, dtype=torch.float64)
    return root @ root.mT


def moments(n: int, outputs: int) -> tuple[Tensor, Tensor]:
    return torch.randn(outputs, n, dtype=torch.float64), covariance(n, outputs)


@pytest.mark.parametrize("shared", [False, True], ids=["a prior for each output", "one prior for all"])
@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_divergence_of_processes_is_that_of_torch_at_the_points(shared, jitter):
    mean, own = moments(4, 3)
    prior_mean, prior = moments(4, 1 if shared else 3)
    found = process_divergence(mean, own, prior_mean, prior, jitter=jitter)
    noise = jitter * prior.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(4, dtype=torch.float64)
    expected = kl_divergence(MultivariateNormal(mean, own + noise), MultivariateNormal(prior_mean, prior + noise))
    assert torch.allclose(found, expected)


def test_noise_never_adds_to_the_divergence():
    mean, own = moments(5, 2)
    prior_mean, prior = moments(5, 2)
    values = [process_divergence(mean, own, prior_mean, prior, jitter=each) for each in (0.0, 0.01, 0.1, 1.0)]
    assert all((less < more).all() for more, less in itertools.pairwise(values))


def test_covariance_that_is_none_gives_no_number_rather_than_an_error():
    mean, own = moments(3, 2)
    own[1] = -own[1]
    value = process_divergence(mean, own, mean, covariance(3, 2))
    assert torch.isfinite(value[0]) and torch.isnan(value[1])


# --- the objective ---------------------------------------------------------------------------------------------------


def linear_problem(seed: int) -> tuple[LinearGaussian, kn.FunctionSpaceVI]:
    """A linear model with the prior over functions that its prior over weights makes; d + 1 = 4 weights."""
    problem = LinearGaussian.make(n=30, noise=0.7, seed=seed, prior_scale=1.3)
    kernel = kn.LinearKernel(scale=1.3, bias=1.3)
    return problem, kn.FunctionSpaceVI(prior=kernel, context_points=12, jitter=1e-10)


def weight_divergence(loc: Tensor, std: Tensor, scale: float) -> float:
    each = torch.distributions.kl_divergence(
        torch.distributions.Normal(loc, std), torch.distributions.Normal(torch.zeros_like(loc), scale)
    )
    return each.sum().item()


def test_divergence_of_linear_functions_is_that_of_the_weights(seed):
    problem, method = linear_problem(seed)
    objective = method.objective(problem.model(), problem.x, len(problem.x), seed=seed)
    with torch.no_grad():
        objective.q[1] = torch.rand(4, dtype=torch.float64) - 1.5
    loc, scale = ({name: value.detach() for name, value in each.items()} for each in objective.loc_and_scale())
    expected = weight_divergence(problem.as_flat(loc), problem.as_flat(scale), 1.3)
    # twelve points in general position determine four weights: only the jitter is between the two
    for _ in range(3):
        index = torch.randperm(len(objective.pool))[:12]
        assert objective.function_divergence(index).item() == pytest.approx(expected, rel=1e-4)


def test_fewer_points_than_weights_see_less_of_the_divergence(seed):
    problem, method = linear_problem(seed)
    objective = method.objective(problem.model(), problem.x, len(problem.x), seed=seed)
    order = torch.randperm(len(objective.pool))
    values = [objective.function_divergence(order[:n]).item() for n in (1, 2, 3, 4, 8)]
    assert values[0] < values[1] < values[2] < values[3]
    assert values[4] == pytest.approx(values[3], rel=1e-2)


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_loss_is_the_bound_per_example_on_a_linear_model(seed, beta):
    problem, method = linear_problem(seed)
    x, y = problem.data
    method = kn.FunctionSpaceVI(prior=method.prior, context_points=12, jitter=1e-10, beta=beta, draws=4_000)
    objective = method.objective(problem.model(), x, len(x), seed=seed)
    loss, terms = objective(x, y)
    loc, scale = (problem.as_flat(each) for each in objective.loc_and_scale())
    fit = expected_log_likelihood(problem, loc, scale)
    kl = weight_divergence(loc, scale, 1.3)
    assert terms["kl"].item() == pytest.approx(kl, rel=1e-4)
    assert terms["function_kl"].item() == pytest.approx(kl, rel=1e-4)
    # scales are 0.02 at the start, so one draw of N log likelihoods has a standard deviation of a few times
    # sum |residual| * 0.02 / noise^2; the mean of 4,000 local draws is within five of its standard errors
    residual = (y - objective.model.forward(objective.model.params(), x)).abs().sum().item()
    error = 5 * residual * 0.02 * 4 / 0.7**2 / math.sqrt(4_000)
    assert loss.item() * 30 == pytest.approx(-(fit - beta * kl), abs=error)


def test_a_batch_stands_for_all_rows(seed):
    problem, method = linear_problem(seed)
    objective = method.objective(problem.model(), problem.x, 30, seed=seed)
    loss, terms = objective(problem.x[:10], problem.y[:10])
    rest = loss + terms["expected_log_likelihood"] / 30
    assert rest.item() == pytest.approx(terms["kl"].item() / 30, rel=1e-9)


def test_noise_of_the_likelihood_keeps_its_own_prior():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(), kn.Normal(1.0))
    objective = kn.FunctionSpaceVI(prior=kn.LinearKernel()).objective(model, x, 20)
    terms = objective(x, y)[1]
    loc, scale = objective.loc_and_scale()
    own = kl_divergence(
        torch.distributions.Normal(loc["likelihood.log_noise"], scale["likelihood.log_noise"]),
        torch.distributions.Normal(-1.0, 2.0),
    )
    assert (terms["kl"] - terms["function_kl"]).item() == pytest.approx(own.item(), rel=1e-4)


def test_weights_that_are_points_are_trained_through_the_divergence_and_their_prior():
    x, y = torch.randn(20, 2), torch.randn(20, 1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    model = kn.Model(net, kn.Gaussian(0.3), kn.Normal(1.0), random="last_layer")
    objective = kn.FunctionSpaceVI(prior=kn.RBFKernel()).objective(model, x, 20)
    loss, terms = objective(x, y)
    loss.backward()
    assert {"log_prior_of_points", "function_kl"} <= terms.keys()
    assert objective.network_names == ["2.weight", "2.bias"]
    assert all(point.grad is not None and (point.grad != 0).any() for point in objective.points)


def test_some_outputs_stand_for_all_in_the_mean(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 5)).double()
    x = torch.randn(20, 1, 4, 4, dtype=torch.float64)
    model = kn.Model(net, kn.Categorical())
    for prior in (kn.NetworkPrior(100), kn.RBFKernel()):  # one for each output, and one for all
        method = kn.FunctionSpaceVI(prior=prior, context_points=6, context_outputs=2, initial_scale=0.3)
        objective = method.objective(model, x, 20, seed=seed)
        index = torch.arange(6)
        every = objective.function_divergence(index)
        some = [
            objective.function_divergence(index, torch.tensor(pair)) for pair in itertools.combinations(range(5), 2)
        ]
        assert torch.stack(some).mean().item() == pytest.approx(every.item(), rel=1e-9)
        assert torch.stack(some).std() > 1e-3 * every
        drawn = {tuple(objective._some_outputs().tolist()) for _ in range(200)}
        assert {output for pair in drawn for output in pair} == set(range(5))
