"""Tests of normalising flows: their density is that of their draws, and integrates to one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from knowable.inference.variational.flow.layers import KINDS, make_layers
from knowable.inference.variational.flow.posterior import NormalisingFlow

DTYPE = torch.float64


def flow_of(kind: str, size: int, *, layers: int = 3, spread: float = 0.5) -> NormalisingFlow:
    """A flow that has been trained to something."""
    made = make_layers(kind, size, layers, hidden=4, like=torch.zeros(0, dtype=DTYPE))
    flow = NormalisingFlow(torch.randn(size, dtype=DTYPE), 0.5 + torch.rand(size, dtype=DTYPE), made)
    with torch.no_grad():
        for layer in flow.layers:
            for value in layer.parameters():
                value.add_(spread * torch.randn_like(value))
    return flow


def grid(low: float, high: float, count: int) -> tuple[Tensor, float]:
    """Points of a square ``(count², 2)`` and the area that each stands for."""
    axis = torch.linspace(low, high, count, dtype=DTYPE)
    return torch.cartesian_prod(axis, axis), ((high - low) / (count - 1)) ** 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_integrates_to_one(seed, kind):
    # the rectangle rule on smooth densities that vanish at the border errs by far less than a hundredth; what lies
    # outside of the square is checked by draws
    flow = flow_of(kind, 2, spread=0.3)
    with torch.no_grad():
        values, area = grid(-25.0, 25.0, 1001)
        assert flow(torch.randn(20_000, 2, dtype=DTYPE))[0].abs().max() < 25
        assert flow.inverse(values)[1].exp().sum().item() * area == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_know_their_density_and_their_noise(seed, kind, size):
    flow, noise = flow_of(kind, size), torch.randn(30, size, dtype=DTYPE)
    values, log_density = flow(noise)
    back, again = flow.inverse(values)
    torch.testing.assert_close(back, noise, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(again, log_density, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_density_is_that_of_a_change_of_variables(seed, kind):
    flow, noise = flow_of(kind, 3), torch.randn(5, 3, dtype=DTYPE)
    _, log_density = flow(noise)
    for row, found in zip(noise, log_density, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda each: flow(each.unsqueeze(0))[0][0], row)
        normal = -0.5 * row.square().sum() - 1.5 * math.log(2 * math.pi)
        torch.testing.assert_close(found, normal - torch.linalg.slogdet(jacobian)[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_flow_is_a_mean_field_normal(seed, kind):
    loc, scale = torch.randn(4, dtype=DTYPE), torch.rand(4, dtype=DTYPE) + 0.1
    flow = NormalisingFlow(loc, scale, make_layers(kind, 4, 3, hidden=4, like=loc))
    noise = torch.randn(6, 4, dtype=DTYPE)
    values, log_density = flow(noise)
    torch.testing.assert_close(values, loc + scale * noise)
    torch.testing.assert_close(log_density, torch.distributions.Normal(loc, scale).log_prob(values).sum(-1))
    assert flow.size == 4
