from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knowable.inference.variational.divergence import Stretch
from knowable.inference.variational.reparameterise import DrawAndDivergence

SIZE, SPLIT = 9, 5  # five weights are drawn, four are left to their layers


def stretches(generator: torch.Generator) -> list[Stretch]:
    """A normal, a flat, an empty one, and one with values for every element: together they cover the buffer."""
    values = 0.5 + torch.rand((2, 3), generator=generator, dtype=torch.float64)
    return [
        Stretch(0, 3, 0.2, 4.0, 1.0, 0.7),
        Stretch(3, 5),
        Stretch(5, 6, 0.0, 0.0, 1.0, 0.1),
        Stretch(6, 9, values[0], values[1], 1.0, 0.0),
    ]


def plainly(q: Tensor, noise: Tensor, parts: list[Stretch]) -> tuple[Tensor, ...]:
    """The same by autograd."""
    loc, scale = q[0], q[1].exp()
    draws = [loc[:SPLIT] + scale[:SPLIT] * each for each in noise]
    kl = sum((part.value(loc, q[1], scale) for part in parts), torch.zeros((), dtype=q.dtype))
    return kl, loc[SPLIT:], scale[SPLIT:].square(), *draws


@pytest.mark.parametrize("draws", [1, 3])
def test_values_and_gradients_are_those_of_autograd(generator, draws):
    q = torch.randn((2, SIZE), generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn((draws, SPLIT), generator=generator, dtype=torch.float64)
    parts = stretches(generator)
    expected = plainly(q, noise, parts)
    found = DrawAndDivergence.apply(q, noise.clone(), parts)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(values, q, weights)[0] for values in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draws", [1, 2])
def test_gradients_are_those_of_finite_differences(generator, draws):
    q = torch.randn((2, SIZE), generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn((draws, SPLIT), generator=generator, dtype=torch.float64)
    parts = stretches(generator)
    assert torch.autograd.gradcheck(lambda at: DrawAndDivergence.apply(at, noise.clone(), parts), (q,))


def test_outputs_that_are_not_used_add_nothing_to_the_gradient(generator):
    q = torch.randn((2, SIZE), generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn((2, SPLIT), generator=generator, dtype=torch.float64)
    parts = stretches(generator)
    for index in range(5):
        found = torch.autograd.grad(DrawAndDivergence.apply(q, noise.clone(), parts)[index].sum(), q)[0]
        expected = torch.autograd.grad(plainly(q, noise, parts)[index].sum(), q)[0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("split", [0, SIZE])
def test_all_weights_may_be_drawn_or_none(generator, split):
    q = torch.randn((2, SIZE), generator=generator, dtype=torch.float64, requires_grad=True)
    noise = torch.randn((1, split), generator=generator, dtype=torch.float64)
    parts = [Stretch(0, SIZE, 0.0, 1.0, 1.0, 0.0)]
    _, loc, variance, draw = DrawAndDivergence.apply(q, noise.clone(), parts)
    torch.testing.assert_close(draw, q[0, :split] + q[1, :split].exp() * noise[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loc, q[0, split:])
    torch.testing.assert_close(variance, (2 * q[1, split:]).exp(), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda at: DrawAndDivergence.apply(at, noise.clone(), parts), (q,))
