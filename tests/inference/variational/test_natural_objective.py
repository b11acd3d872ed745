"""Tests of the natural step, against variational online Newton written out as in the paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.natural import adaptive_change, natural_step
from knowable.testing import LinearGaussian

STEP = {"step": 1, "scale": 1.0, "rate": 0.01, "decay": 0.0, "radius": 0.1}


def online_newton(
    loc: Tensor, scale: Tensor, draw: Tensor, gradient: Tensor, *, size: int, rate: float, share: float
) -> tuple[Tensor, Tensor]:
    """A step of the paper's algorithm, in its own terms: curvature h, weight decay δ = 1 / N, no momentum."""
    decay = 1.0 / size
    h = 1.0 / (size * scale**2) - decay
    estimate = gradient * (draw - loc) / scale**2
    h = h + share * (estimate - h) + 0.5 * (share * (h - estimate)) ** 2 / (h + decay)
    return loc - rate * (gradient + decay * loc) / (h + decay), 1.0 / (size * (h + decay)).sqrt()


def drawn_like(objective: MeanFieldObjective, seed: int) -> Tensor:
    """The weights that the next forward pass will draw, if the generator has that seed."""
    torch.manual_seed(seed)
    noise = torch.randn((1, objective.layout.size), dtype=objective.q.dtype)
    return (objective.q[0] + objective.q[1].exp() * noise[0]).detach()


def likelihood_gradient(objective: MeanFieldObjective, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of minus the mean log likelihood at the drawn weights, by plain autograd."""
    flat = flat.clone().requires_grad_()
    loss = -objective.model.log_likelihood(objective.layout.views(flat), x, y).mean()
    return torch.autograd.grad(loss, flat)[0]


@pytest.mark.parametrize("rows", [24, 6], ids=["all rows", "a batch"])
def test_step_is_that_of_variational_online_newton(seed, rows):
    problem = LinearGaussian.make(n=24, seed=seed)
    method = kn.NaturalVI(initial_scale=0.3, momentum=0.0, curvature_rate=0.05, radius=1e3)
    objective = method.objective(problem.model(), problem.x, 24)
    optimiser = torch.optim.Adam(objective.parameters(), lr=20.0)  # the paper's rate: 20 / 1e3
    x, y = problem.x[:rows], problem.y[:rows]
    for number in range(3):
        draw = drawn_like(objective, seed + number)
        gradient = likelihood_gradient(objective, draw, x, y)
        loc, scale = objective.q[0].detach(), objective.q[1].detach().exp()
        expected = online_newton(loc, scale, draw, gradient, size=24, rate=0.02, share=0.05)
        torch.manual_seed(seed + number)
        objective(x, y)[0].backward()
        objective.update(optimiser)
        torch.testing.assert_close(objective.q[0].detach(), expected[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(objective.q[1].detach().exp(), expected[1], rtol=1e-9, atol=1e-12)


def test_prior_precision_is_that_of_each_parameter(seed):
    # without data to speak of (noise 1e6), the scales go to those of the priors and the means to their means
    problem = LinearGaussian.make(n=20, seed=seed)
    prior = {"weight": kn.Normal(0.5, loc=0.3), "bias": kn.Normal(2.0)}
    model = kn.Model(problem.model().net, kn.Gaussian(1e6), prior)
    posterior = kn.NaturalVI(epochs=800, learning_rate=0.05, initial_scale=0.5).fit(model, problem.data, seed=seed)
    torch.testing.assert_close(
        posterior.scale["weight"], torch.full((1, 3), 0.5, dtype=torch.float64), rtol=1e-3, atol=0
    )
    torch.testing.assert_close(posterior.scale["bias"], torch.full((1,), 2.0, dtype=torch.float64), rtol=1e-3, atol=0)
    torch.testing.assert_close(posterior.loc["weight"], torch.full((1, 3), 0.3, dtype=torch.float64), rtol=0, atol=1e-2)


@pytest.mark.parametrize("noise", [1e-3, 1.0, 1e6])
def test_precision_stays_positive_and_at_most_halves(generator, noise):
    q = torch.randn(2, 1000, generator=generator, dtype=torch.float64)
    before = q[1].clone()
    change = noise * torch.randn(1000, generator=generator, dtype=torch.float64)
    natural_step(q, change, torch.zeros_like(change), torch.zeros_like(change), **STEP)
    assert torch.isfinite(q).all()
    assert (q[1] <= before + 0.5 * math.log(2.0) + 1e-12).all()  # the scale grows by √2 at the most


def test_no_mean_moves_further_than_the_learning_rate(generator):
    q, gradient = torch.zeros(2, 1000, dtype=torch.float64), 10.0 ** torch.linspace(-6, 6, 1000, dtype=torch.float64)
    natural_step(q, torch.zeros_like(gradient), gradient, torch.zeros_like(gradient), **STEP)
    # short ones are rate / radius of a Newton step, here s² g = g
    torch.testing.assert_close(q[0], -(gradient * 0.1).clamp_max(0.01))


def test_momentum_is_the_debiased_mean_of_the_gradients(generator):
    gradients = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    q, momentum = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for step, each in enumerate(gradients, start=1):
        before = q[0].clone()
        settings = {**STEP, "step": step, "decay": 0.8, "rate": 100.0, "radius": 1e4}
        natural_step(q, torch.zeros_like(each), each, momentum, **settings)
        weights = 0.8 ** torch.arange(step - 1, -1, -1, dtype=torch.float64)
        mean = (weights @ gradients[:step]) / weights.sum()
        torch.testing.assert_close(q[0] - before, -0.01 * mean)


def test_log_scales_move_as_adam_would_move_them(generator):
    # without momentum; log P moves by twice as much, and v is so small that log(1 + v + v²/2) is v to the third order
    gradients = torch.randn(6, 50, generator=generator, dtype=torch.float64) * torch.logspace(
        -6, 3, 50, dtype=torch.float64
    )
    squares, theta = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([theta], lr=1e-3, betas=(0.0, 0.99), eps=0.0)
    log_scale = torch.zeros(50, dtype=torch.float64)
    for step, each in enumerate(gradients, start=1):
        log_scale -= 0.5 * adaptive_change(each.clone(), squares, step=step, rate=1e-3)
        theta.grad = each.clone()
        adam.step()
        torch.testing.assert_close(log_scale, theta.detach())


def test_estimates_that_are_zero_change_nothing():
    squares = torch.zeros(4)
    assert torch.equal(adaptive_change(torch.zeros(4), squares, step=1, rate=0.01), torch.zeros(4))


def test_points_move_by_the_optimiser_and_nothing_else_does(seed):
    problem = LinearGaussian.make(n=20, seed=seed)
    model = kn.Model(problem.model().net, kn.Gaussian(problem.noise), random="weight")
    objective = kn.NaturalVI().objective(model, problem.x, 20)
    optimiser = torch.optim.Adam(objective.parameters(), lr=0.01)
    assert objective.layout == Layout.of({"weight": problem.model().net.weight})
    bias = objective.points[0].detach().clone()
    objective(*problem.data)[0].backward()
    slope = objective.points[0].grad.clone()
    objective.update(optimiser)
    torch.testing.assert_close(objective.points[0].detach(), bias - 0.01 * slope.sign(), rtol=0, atol=1e-6)
    assert set(optimiser.state[objective.q]) == {"step", "momentum", "squares"}  # Adam has not seen them
    assert objective.q.grad is None


def test_all_that_a_step_remembers_is_in_the_optimisers_state(seed):
    # a second objective that takes over parameters and state goes on with the same bits
    problem = LinearGaussian.make(n=20, seed=seed)
    first, second = (kn.NaturalVI().objective(problem.model(), problem.x, 20) for _ in range(2))
    optimisers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (first, second)]

    def steps(objective: MeanFieldObjective, optimiser: torch.optim.Optimizer, seeds: range) -> None:
        for number in seeds:
            torch.manual_seed(number)
            objective(*problem.data)[0].backward()
            objective.update(optimiser)

    steps(first, optimisers[0], range(5))
    with torch.no_grad():
        second.q.copy_(first.q)
    optimisers[1].state[second.q] = {k: v.clone() for k, v in optimisers[0].state[first.q].items()}
    steps(first, optimisers[0], range(5, 10))
    steps(second, optimisers[1], range(5, 10))
    assert torch.equal(first.q, second.q)
