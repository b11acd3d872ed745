"""Tests of all planar layers in one go, against the layers one after the other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from knowable.inference.variational.flow.layers import PlanarLayer, make_layers, neighbours, through_planes
from knowable.inference.variational.flow.posterior import NormalisingFlow


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
        monkeypatch.setattr("knowable.inference.variational.flow.layers._BLOCK", block)
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
