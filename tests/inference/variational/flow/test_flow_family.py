"""Tests of flows as a family: they begin as a normal, and give the density of what they draw."""

from __future__ import annotations

import pytest
import torch

import knowable as kn
from knowable.core.network.params import Layout
from knowable.inference.variational.flow.flow import Flow, FlowModule
from knowable.inference.variational.flow.layers import KINDS, CouplingLayer
from tests.core.cases import DTYPE, linear_model

LAYOUT = Layout(("weight", "bias"), (torch.Size([1, 2]), torch.Size([1])))
LOC = torch.tensor([0.5, -1.0, 2.0], dtype=DTYPE)


def trained(kind: str) -> FlowModule:
    """A flow somewhere after its start."""
    module = Flow(kind, hidden=4).build(LAYOUT, LOC, 0.3)
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.3 * torch.randn_like(value))
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_as_independent_normals(seed, kind):
    module = Flow(kind).build(LAYOUT, LOC, 0.3)
    values, log_density = module.draw(50)
    normal = torch.distributions.Normal(LOC, 0.3)
    torch.testing.assert_close(log_density, normal.log_prob(values).sum(-1))
    assert values.shape == (50, 3) and module.layout is LAYOUT
    assert ((values - LOC) / 0.3).abs().max() < 6


@pytest.mark.parametrize("kind", KINDS)
def test_densities_of_draws_are_those_of_the_posterior(seed, kind):
    module = trained(kind)
    values, log_density = module.draw(20)
    posterior = module.posterior(linear_model(), seed=4)
    torch.testing.assert_close(posterior.log_prob(LAYOUT.views(values)), log_density, rtol=1e-6, atol=1e-8)
    assert posterior.seed == 4


@pytest.mark.parametrize("kind", KINDS)
def test_draws_and_densities_are_differentiable_in_every_parameter(seed, kind):
    module = trained(kind)
    values, log_density = module.draw(5)
    (values.square().sum() + log_density.sum()).backward()
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in module.parameters())
    assert module.entropy() is None and module.moments() is None


@pytest.mark.parametrize("kind", ["radial", "real_nvp"])
def test_the_gradient_along_the_path_is_the_gradient(seed, kind):
    # of E[log q], which both estimate without bias: their means over repetitions agree within 5 standard errors
    module, repeats = trained(kind), 50
    params = list(module.parameters())
    found = []
    for along in (False, True):
        each = []
        for _ in range(repeats):
            values, log_density = module.draw(500)
            density = module.held_log_density(values) if along else log_density
            gradients = torch.autograd.grad(density.mean(), params, materialize_grads=True)
            each.append(torch.cat([gradient.flatten() for gradient in gradients]))
        found.append(torch.stack(each))
    error = sum(each.var(0) / repeats for each in found).sqrt()
    assert ((found[0].mean(0) - found[1].mean(0)).abs() <= 5 * error + 1e-12).all()
    assert module.prefers_path


def test_held_densities_are_those_of_the_draws_and_hold_the_flow(seed):
    module = trained("real_nvp")
    values, log_density = module.draw(7)
    held = module.held_log_density(values.detach())
    torch.testing.assert_close(held, log_density.detach())
    assert not held.requires_grad
    assert trained("planar").held_log_density(values) is None


def test_layers_and_width_are_as_asked_or_suit_the_size():
    def shape(family: Flow, size: int) -> tuple[int, int]:
        layout = Layout(("w",), (torch.Size([size]),))
        layers = family.build(layout, torch.zeros(size), 0.1).flow.layers
        return len(layers), layers[0].hidden if isinstance(layers[0], CouplingLayer) else 0

    assert shape(Flow(), 2) == shape(Flow("radial"), 5) == (8, 0)
    assert shape(Flow(), 10_001) == (4, 0)
    assert shape(Flow("real_nvp"), 2) == (4, 32)
    assert shape(Flow("real_nvp"), 1000) == (4, 4)
    assert shape(Flow("real_nvp"), 10_000) == (4, 1)
    assert shape(Flow("real_nvp", layers=3, hidden=7), 10_000) == (3, 7)


@pytest.mark.parametrize("knobs", [{"kind": "glow"}, {"layers": 0}, {"hidden": 0}, {"layers": 2.5}], ids=str)
def test_settings_that_make_no_sense_are_refused_by_name(knobs):
    with pytest.raises((kn.InvalidArgument, kn.InvalidType), match=next(iter(knobs))):
        Flow(**knobs)
