from __future__ import annotations

import pytest
import torch
from torch import Tensor

from knowable.core.network.params import Layout
from knowable.inference.variational.divergence import NormalStretch
from knowable.inference.variational.reparameterise import DrawAndDivergence, Plan, draw_by_autograd

DRAWN = Layout(("a", "b"), (torch.Size([2, 2]), torch.Size([1])))
LOCAL = Layout(("c", "d"), (torch.Size([1]), torch.Size([3])))
NOTHING = Layout((), ())
SIZE = DRAWN.size + LOCAL.size


def mixed_plan(generator: torch.Generator) -> Plan:
    """A normal prior, none of its own, a flat one, and one with values for every element."""
    values = 0.5 + torch.rand((2, 3), generator=generator, dtype=torch.float64)
    stretches = (
        NormalStretch(0, 4, 0.2, 4.0, 1.0, 0.7),
        NormalStretch(4, 5),
        NormalStretch(5, 6, 0.0, 0.0, 1.0, 0.1),
        NormalStretch(6, 9, values[0], values[1], 1.0, 0.0),
    )
    return Plan(DRAWN, LOCAL, stretches)


def plainly(q: Tensor, noise: Tensor, plan: Plan) -> tuple[Tensor, ...]:
    """The same by autograd, from the definitions: KL, local means, local variances, and the draws, by parameter."""
    loc, scale, split = q[0], q[1].exp(), plan.drawn.size
    kl = sum((each.value(loc, q[1], scale) for each in plan.stretches), torch.zeros((), dtype=q.dtype))
    local = [*plan.local.views(loc[split:]).values(), *plan.local.views(scale[split:].square()).values()]
    draws = [view for each in noise for view in plan.drawn.views(loc[:split] + scale[:split] * each).values()]
    return kl, *local, *draws


def scattered(generator: torch.Generator, draws: int, split: int = DRAWN.size) -> tuple[Tensor, Tensor]:
    q = torch.randn((2, SIZE), generator=generator, dtype=torch.float64, requires_grad=True)
    return q, torch.randn((draws, split), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("make", [DrawAndDivergence.apply, draw_by_autograd], ids=["by hand", "by autograd"])
def test_values_and_gradients_are_those_of_autograd(generator, draws, make):
    q, noise = scattered(generator, draws)
    plan = mixed_plan(generator)
    expected, found = plainly(q, noise, plan), make(q, noise.clone(), plan)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(values, q, weights)[0] for values in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draws", [1, 2])
def test_gradients_are_those_of_finite_differences(generator, draws):
    q, noise = scattered(generator, draws)
    plan = mixed_plan(generator)
    assert torch.autograd.gradcheck(lambda at: DrawAndDivergence.apply(at, noise.clone(), plan), (q,))


def test_outputs_that_are_not_used_add_nothing_to_the_gradient(generator):
    q, noise = scattered(generator, 2)
    plan = mixed_plan(generator)
    for index in range(len(plainly(q, noise, plan))):
        found = torch.autograd.grad(DrawAndDivergence.apply(q, noise.clone(), plan)[index].sum(), q)[0]
        expected = torch.autograd.grad(plainly(q, noise, plan)[index].sum(), q)[0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("everything", ["drawn", "local"])
def test_all_weights_may_be_drawn_or_none(generator, everything):
    layout = Layout(("w",), (torch.Size([SIZE]),))
    parts = (layout, NOTHING) if everything == "drawn" else (NOTHING, layout)
    plan = Plan(*parts, (NormalStretch(0, SIZE, 0.0, 1.0, 1.0, 0.0),))
    q, noise = scattered(generator, 1, plan.drawn.size)
    for one, other in zip(DrawAndDivergence.apply(q, noise.clone(), plan), plainly(q, noise, plan), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda at: DrawAndDivergence.apply(at, noise.clone(), plan), (q,))
