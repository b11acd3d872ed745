from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.divergence import LogUniformSegment, NormalSegment
from knowable.inference.variational.normals import DrawAndKL, FlatNormals, draw_by_autograd

DRAWN = Layout(("a", "b"), (torch.Size([2, 2]), torch.Size([1])))
LOCAL = Layout(("c", "d"), (torch.Size([1]), torch.Size([3])))
NOTHING = Layout((), ())
SIZE = DRAWN.size + LOCAL.size


def mixed_normals(generator: torch.Generator) -> FlatNormals:
    """A normal prior, none of its own, a flat one, and one with values for every element."""
    values = 0.5 + torch.rand((2, 3), generator=generator, dtype=torch.float64)
    segments = (
        NormalSegment(0, 4, 0.2, 4.0, 1.0, 0.7),
        NormalSegment(4, 5),
        NormalSegment(5, 6, 0.0, 0.0, 1.0, 0.1),
        NormalSegment(6, 9, values[0], values[1], 1.0, 0.0),
    )
    return FlatNormals(DRAWN, LOCAL, segments)


def plainly(q: Tensor, noise: Tensor, normals: FlatNormals) -> tuple[Tensor, ...]:
    """The same by autograd, from the definitions: KL, local means, local variances, and the draws, by parameter."""
    loc, scale, split = q[0], q[1].exp(), normals.drawn.size
    kl = sum((each.value(loc, q[1], scale) for each in normals.segments), torch.zeros((), dtype=q.dtype))
    local = [*normals.local.views(loc[split:]).values(), *normals.local.views(scale[split:].square()).values()]
    draws = [view for each in noise for view in normals.drawn.views(loc[:split] + scale[:split] * each).values()]
    return kl, *local, *draws


def scattered(generator: torch.Generator, draws: int, split: int = DRAWN.size) -> tuple[Tensor, Tensor]:
    q = torch.randn((2, SIZE), generator=generator, dtype=torch.float64, requires_grad=True)
    return q, torch.randn((draws, split), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("make", [DrawAndKL.apply, draw_by_autograd], ids=["by hand", "by autograd"])
def test_values_and_gradients_are_those_of_autograd(generator, draws, make):
    q, noise = scattered(generator, draws)
    normals = mixed_normals(generator)
    expected, found = plainly(q, noise, normals), make(q, noise.clone(), normals)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad(values, q, weights)[0] for values in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("draws", [1, 2])
def test_gradients_are_those_of_finite_differences(generator, draws):
    q, noise = scattered(generator, draws)
    normals = mixed_normals(generator)
    assert torch.autograd.gradcheck(lambda at: DrawAndKL.apply(at, noise.clone(), normals), (q,))


def test_outputs_that_are_not_used_add_nothing_to_the_gradient(generator):
    q, noise = scattered(generator, 2)
    normals = mixed_normals(generator)
    for index in range(len(plainly(q, noise, normals))):
        found = torch.autograd.grad(DrawAndKL.apply(q, noise.clone(), normals)[index].sum(), q)[0]
        expected = torch.autograd.grad(plainly(q, noise, normals)[index].sum(), q)[0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("everything", ["drawn", "local"])
def test_all_weights_may_be_drawn_or_none(generator, everything):
    layout = Layout(("w",), (torch.Size([SIZE]),))
    parts = (layout, NOTHING) if everything == "drawn" else (NOTHING, layout)
    normals = FlatNormals(*parts, (NormalSegment(0, SIZE, 0.0, 1.0, 1.0, 0.0),))
    q, noise = scattered(generator, 1, normals.drawn.size)
    for one, other in zip(DrawAndKL.apply(q, noise.clone(), normals), plainly(q, noise, normals), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda at: DrawAndKL.apply(at, noise.clone(), normals), (q,))


# --- the log-uniform prior -------------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def test_log_uniform_priors_are_one_segment_with_a_gradient_by_hand():
    model = kn.Model(network(), kn.Gaussian(0.1), {"*.bias": kn.Horseshoe(), "*": kn.LogUniform()})
    normals = FlatNormals.of(model, torch.zeros(3, 2, dtype=torch.float64), model.params(), "local")
    assert set(normals.others) == {"0.bias", "2.bias"}
    sizes = [each.stop - each.start for each in normals.segments if isinstance(each, LogUniformSegment)]
    assert sizes == [9]


@pytest.mark.parametrize("recording", [False, True])
def test_kl_and_gradient_under_log_uniform_priors_are_those_of_autograd(seed, recording):
    model = kn.Model(network(), kn.Gaussian(0.1), kn.LogUniform())
    normals = FlatNormals.of(model, torch.zeros(3, 2, dtype=torch.float64), model.params(), "weight")
    q = normals.initial(model.params(), 0.3).requires_grad_()
    noise = torch.randn(1, normals.drawn.size, dtype=torch.float64)
    kl, *_ = normals.draw(q, noise, recording=recording)
    expected = kn.LogUniform().kl_from_normal(q[0], q[1].exp())
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(torch.autograd.grad(kl, q)[0], torch.autograd.grad(expected, q)[0])
