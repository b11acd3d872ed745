"""Tests of invertible maps: their volume change against autograd's Jacobian, their inverses by going there and back."""

from __future__ import annotations

import copy
import math

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

from knowable.inference.variational.flow import NormalisingFlow
from knowable.inference.variational.flow_layers import (
    KINDS,
    Bijection,
    PlanarLayer,
    RadialLayer,
    make_layers,
    neighbours,
    solve_bend,
    through_planes,
)

DTYPE = torch.float64
SIZES = [1, 2, 3, 6]


def layer_of(kind: str, size: int, *, spread: float = 1.0) -> Bijection:
    """A layer that has been trained to something: all its parameters at random."""
    made = make_layers(kind, size, 2, hidden=4, like=torch.zeros(0, dtype=DTYPE))
    layer = made[size % 2]  # of coupling layers now one half moves, now the other
    with torch.no_grad():
        for value in layer.parameters():
            value.copy_(spread * torch.randn_like(value))
    return layer


def points(size: int, count: int = 50) -> Tensor:
    return 2 * torch.randn(count, size, dtype=DTYPE)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_determinants_are_those_of_the_jacobian(seed, kind, size):
    layer, z = layer_of(kind, size), points(size, 10)
    _, log_det = layer(z)
    for row, found in zip(z, log_det, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda each: layer(each.unsqueeze(0))[0][0], row)
        sign, expected = torch.linalg.slogdet(jacobian)  # type: ignore[arg-type]
        assert sign == 1  # space is bent and never folded
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_again(seed, kind, size):
    layer, z = layer_of(kind, size), points(size)
    y, log_det = layer(z)
    back, again = layer.inverse(y)
    torch.testing.assert_close(back, z)
    torch.testing.assert_close(again, log_det)


@pytest.mark.parametrize("kind", [PlanarLayer.kind, RadialLayer.kind])
def test_there_and_back_again_however_hard_the_layer_pulls(seed, kind):
    # without their limits these would fold space; at the limit a volume shrinks to a thousandth
    for _ in range(20):
        layer, z = layer_of(kind, 3, spread=30.0), points(3)
        y, log_det = layer(z)
        assert torch.isfinite(log_det).all()
        back, _ = layer.inverse(y)
        # rounding of y, enlarged by the inverse's steepness, at most a thousand in a planar layer's one direction
        torch.testing.assert_close(back, z, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_new_layers_are_the_identity_and_not_alike(seed, kind):
    first, second, *_ = make_layers(kind, 5, 3, hidden=4, like=torch.zeros(0, dtype=DTYPE))
    z = points(5)
    for layer in (first, second):
        y, log_det = layer(z)
        torch.testing.assert_close(y, z)
        torch.testing.assert_close(log_det, torch.zeros_like(log_det), rtol=0.0, atol=1e-14)
    assert any(
        one.shape != other.shape or not torch.equal(one, other)
        for one, other in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_of_a_layer_is_learned(seed, kind):
    layer, z = layer_of(kind, 4), points(4)
    y, log_det = layer(z)
    (y.square().sum() + log_det.sum()).backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_the_inverse_is_differentiable(seed, kind):
    layer = layer_of(kind, 3)
    y = layer(points(3, 4))[0].detach().requires_grad_()
    assert torch.autograd.gradcheck(layer.inverse, (y,))


def test_coupling_layers_take_turns_and_leave_one_half_alone(seed):
    first, second = make_layers("real_nvp", 5, 2, hidden=4, like=torch.zeros(0, dtype=DTYPE))
    for layer, held in ((first, slice(0, None, 2)), (second, slice(1, None, 2))):
        with torch.no_grad():
            for value in layer.parameters():
                value.copy_(torch.randn_like(value))
        z = points(5)
        moved = layer(z)[0] != z
        assert not moved[:, held].any()
        others = torch.ones(5, dtype=torch.bool)
        others[held] = False
        assert moved[:, others].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_have_the_type_they_are_made_for(kind, dtype):
    for layer in make_layers(kind, 3, 2, hidden=2, like=torch.zeros(0, dtype=dtype)):
        assert all(value.dtype == dtype for value in layer.parameters())
        assert layer(torch.zeros(2, 3, dtype=dtype))[0].dtype == dtype


@pytest.mark.parametrize("slope", [-0.999, -0.5, 0.0, 0.7, 50.0])
def test_bend_is_solved_as_scipy_does(slope):
    target = torch.linspace(-20, 20, 41, dtype=DTYPE)
    found = solve_bend(target, torch.tensor(slope, dtype=DTYPE))
    for t, a in zip(target.tolist(), found.tolist(), strict=True):
        expected = scipy.optimize.brentq(lambda a, t=t: a + slope * math.tanh(a) - t, t - 51, t + 51, xtol=1e-13)
        assert a == pytest.approx(expected, abs=1e-6 if slope < -0.9 else 1e-10)  # a nearly flat function at -0.999


def test_derivatives_of_the_bend_are_right():
    target = torch.linspace(-2, 2, 5, dtype=DTYPE, requires_grad=True)
    slope = torch.tensor(-0.6, dtype=DTYPE, requires_grad=True)
    assert torch.autograd.gradcheck(solve_bend, (target, slope))


# --- flow planar stack -----------------------------------------------------------------------------------------------


def layers_of(count: int, size: int) -> list[PlanarLayer]:
    made = make_layers("planar", size, count, hidden=1, like=torch.zeros((), dtype=torch.float64))
    layers = [layer for layer in made if isinstance(layer, PlanarLayer)]
    assert len(layers) == count
    for layer in layers:
        nn.init.normal_(layer.push, std=2.0)  # strong enough that some would fold space over itself
    return layers


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("count", [1, 5])
def test_stack_gives_what_the_layers_give_also_in_gradient(seed, count, draws):
    torch.manual_seed(seed)
    layers = layers_of(count, 7)
    noise = torch.randn((draws, 7), dtype=torch.float64, requires_grad=True)
    expected, log_det = noise, torch.zeros((), dtype=torch.float64)
    for layer in layers:
        expected, change = layer(expected)
        log_det = log_det + change
    leaves = [noise, *nn.ModuleList(layers).parameters()]
    weights = torch.randn_like(expected)
    found = through_planes(noise, layers)
    for one, other in zip(found, (expected, log_det), strict=True):
        torch.testing.assert_close(one, other)
    gradients = [
        torch.autograd.grad((values * weights).sum() + change.square().sum(), leaves)
        for values, change in (found, (expected, log_det))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_blocks_leave_no_seam(monkeypatch):
    torch.manual_seed(0)
    layers, noise = layers_of(3, 11), torch.randn((1, 11), dtype=torch.float64)
    leaves, found = list(nn.ModuleList(layers).parameters()), []
    for block in (100, 4):
        monkeypatch.setattr("knowable.inference.variational.flow_layers._BLOCK", block)
        values, log_det = through_planes(noise, layers)
        found.append(torch.autograd.grad(values.square().sum() + log_det.sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_neighbours_are_one_matrix_without_a_copy_until_they_are_moved():
    layers = layers_of(3, 5)
    vectors = [*(layer.direction for layer in layers), *(layer.push for layer in layers)]
    assert neighbours(vectors).data_ptr() == vectors[0].data_ptr()
    moved = copy.deepcopy(vectors)
    for given in (vectors, moved, vectors[::-1], [vectors[0].detach()[::2], vectors[1].detach()[::2]]):
        assert torch.equal(neighbours(given), torch.stack(list(given)))


@pytest.mark.parametrize("kind", ["planar", "radial", "real_nvp"])
def test_draw_of_a_flow_is_the_flow(kind):
    torch.manual_seed(0)
    like = torch.zeros((), dtype=torch.float64)
    flow = NormalisingFlow(
        torch.randn(6).double(), torch.rand(6).double(), make_layers(kind, 6, 3, hidden=4, like=like)
    )
    for param in flow.parameters():
        nn.init.normal_(param)
    noise = torch.randn((4, 6), dtype=torch.float64)
    for one, other in zip(flow.draw(noise), flow(noise), strict=True):
        torch.testing.assert_close(one, other)
