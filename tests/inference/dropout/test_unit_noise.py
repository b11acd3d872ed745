from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Gamma, InverseGamma, LogNormal

from knowable.inference.dropout.truncated_log_normal import divergence_from_log_uniform
from knowable.inference.dropout.unit_noise import GroupNoise, HorseshoeNoise, LogUniformNoise

LIKE = torch.zeros((), dtype=torch.float64)


def log_uniform() -> LogUniformNoise:
    noise = LogUniformNoise(4, span=20.0, like=LIKE)
    with torch.no_grad():
        noise.loc.copy_(torch.tensor([0.0, -0.5, -3.0, 1.0]))
        noise.log_scale.copy_(torch.tensor([-3.0, 0.5, -1.0, 0.0]))
    return noise


def horseshoe() -> HorseshoeNoise:
    noise = HorseshoeNoise(4, global_scale=1e-2, like=LIKE)
    with torch.no_grad():
        noise.global_loc.copy_(torch.tensor([-1.0, 2.0]))
        noise.global_log_scale.copy_(torch.tensor([-0.7, -0.2]))
        noise.loc.copy_(torch.tensor([[-2.0, 0.0, 0.3, 1.0], [1.0, 2.0, 0.0, -1.0]]))
        noise.log_scale.copy_(torch.tensor([[-1.0, -3.0, 0.1, -0.5], [-2.0, -1.0, -0.3, -0.4]]))
    return noise


NOISES = {"log_uniform": log_uniform, "horseshoe": horseshoe}


@pytest.mark.parametrize("kind", NOISES)
def test_draws_have_the_moments(kind, generator):
    noise, n = NOISES[kind](), 40_000
    mean, spread = (each.detach() for each in noise.moments())
    drawn = noise.draw(n, generator).detach() / mean
    assert ((drawn.mean(0) - 1).abs() < 5 * (spread / n).sqrt()).all()
    squares = (drawn - 1).square()
    assert ((squares.mean(0) - spread).abs() < 6 * squares.std(0) / math.sqrt(n)).all()


@pytest.mark.parametrize("kind", NOISES)
def test_draws_follow_the_generator_or_the_global_one(kind, generator):
    noise = NOISES[kind]()
    state = generator.get_state()
    first = noise.draw(3, generator)
    generator.set_state(state)
    assert torch.equal(noise.draw(3, generator), first)
    torch.manual_seed(1)
    second = noise.draw(3)
    torch.manual_seed(1)
    assert torch.equal(noise.draw(3), second) and second.shape == (3, 4)


@pytest.mark.parametrize("kind", NOISES)
def test_noise_begins_narrow(kind):
    make = {"log_uniform": LogUniformNoise, "horseshoe": HorseshoeNoise}[kind]
    extra = {"span": 20.0} if kind == "log_uniform" else {"global_scale": 1e-5}
    mean, spread = make(3, initial_scale=0.02, like=LIKE, **extra).moments()
    assert ((mean - 1).abs() < 0.03).all() and (spread < 0.03**2).all()


def test_the_divergence_of_all_units_is_their_sum():
    noise = log_uniform()
    each = divergence_from_log_uniform(noise.loc, noise.log_scale.exp(), -20.0, 0.0)
    assert torch.isclose(noise.divergence(), each.sum())


def test_the_divergence_of_the_horseshoe_is_that_of_its_parts(generator):
    noise, n = horseshoe(), 40_000
    half = torch.tensor(0.5, dtype=torch.float64)
    priors = (Gamma(half, torch.ones_like(half)), InverseGamma(half, torch.ones_like(half)))
    total = torch.zeros(n, dtype=torch.float64)
    for loc, log_scale in ((noise.global_loc, noise.global_log_scale), (noise.loc, noise.log_scale)):
        for part, prior in enumerate(priors):
            own = LogNormal(loc[part].detach(), log_scale[part].detach().exp())
            shape = (n, *loc[part].shape)
            drawn = torch.exp(own.loc + own.scale * torch.randn(shape, generator=generator, dtype=torch.float64))
            total += (own.log_prob(drawn) - prior.log_prob(drawn)).view(n, -1).sum(1)
    assert abs(total.mean() - noise.divergence()) < 5 * total.std() / math.sqrt(n)


def test_units_of_a_layer_share_its_scale(generator):
    noise, n = horseshoe(), 20_000
    logs = noise.draw(n, generator).detach().log()
    shared, own = (each.detach() for each in noise._log_variances())
    expected = torch.full((4, 4), shared.item()).double() + torch.diag(own)
    error = ((expected.diagonal().outer(expected.diagonal()) + expected.square()) / n).sqrt()
    assert ((logs.T.cov() - expected).abs() < 5 * error).all()
    assert (logs.mean(0).abs() < 5 * (expected.diagonal() / n).sqrt()).all()  # the median is not in the draws


@pytest.mark.parametrize("median", [1e-7, 0.3])
def test_medians_begin_where_they_are_told(median):
    noise = HorseshoeNoise(3, global_scale=1e-5, initial_median=median, like=LIKE)
    assert torch.allclose(noise.log_prior_scale(), torch.full((3,), math.log(median)).double())
    assert noise.divergence() < 100  # and not where the prior has no mass


def test_the_median_is_half_the_sum_of_the_logarithms():
    noise = horseshoe()
    expected = math.log(1e-2) + 0.5 * (-1.0 + 2.0 + torch.tensor([-1.0, 2.0, 0.3, 0.0]))
    assert torch.allclose(noise.log_prior_scale(), expected.double())
    assert log_uniform().log_prior_scale() is None


def test_what_has_left_its_range_is_put_back():
    noise = LogUniformNoise(3, span=5.0, like=LIKE)
    with torch.no_grad():
        noise.loc.copy_(torch.tensor([-100.0, -1.0, 100.0]))
        noise.log_scale.copy_(torch.tensor([-50.0, 0.0, 50.0]))
    noise.settle()
    assert noise.loc.tolist() == [-10.0, -1.0, 5.0]
    assert torch.allclose(noise.log_scale.exp(), torch.tensor([1e-4, 1.0, 50.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", NOISES)
def test_gradients_reach_every_parameter(kind):
    noise: GroupNoise = NOISES[kind]()
    torch.manual_seed(0)
    loss: Tensor = noise.draw(5).square().sum() + noise.divergence()
    loss.backward()
    assert all(each.grad is not None and (each.grad != 0).all() for each in noise.parameters())


@pytest.mark.parametrize("kind", NOISES)
def test_several_layers_at_once_are_each_by_itself(kind):
    first, second = NOISES[kind](), NOISES[kind]()
    with torch.no_grad():
        for value in second.parameters():
            value.mul_(0.7)
    expected = first.divergence() + second.divergence()
    assert torch.isclose(type(first).total_divergence([first, second]), expected)
